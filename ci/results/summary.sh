#!/bin/sh
# usage: ci/results/summary.sh LOG
# Prints of a GPU run's log what its claims rest on: pytest's counts and faults, which
# stack ran, how its decode steps got their metadata, how many steps were compared.
set -eu
[ -f "${1:-}" ] || {
    sed -n '2,4s/^# //p' "$0" >&2
    exit 2
}
sed -En '
    s/^.*pid=[0-9]+\) (INFO|WARNING|ERROR) [0-9: -]+\[[a-z_.0-9:]+\] //
    /^(vLLM [0-9.]+ with stack |DeepSeek-V4\.1 decode: )/p
    /(^|^\.+)decode metadata: /s/^\.*//p
    /^(collected [0-9]+ items|steps (compared|run): |[0-9]+ window groups)/p
    /^E  +[^ ]|^(FAILED|SKIPPED|ERROR) (tests|\[)/p
    /^=+ .*(passed|failed|error).* =+$/p
    /^[0-9]+ passed/p
' "$1" | cut -c1-400 | uniq
