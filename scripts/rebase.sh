#!/bin/sh
# See scripts/rebase.sh --help; the work is done by scripts/patchstack/commands/rebase.py.
. "$(dirname -- "$(readlink -f -- "$0")")/patchstack/start.sh"
patchstack rebase "$@"
