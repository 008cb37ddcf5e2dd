#!/bin/sh
# See scripts/apply.sh --help; the work is done by scripts/patchstack/commands/apply.py.
. "$(dirname -- "$(readlink -f -- "$0")")/patchstack/start.sh"
patchstack apply "$@"
