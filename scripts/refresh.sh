#!/bin/sh
# See scripts/refresh.sh --help; the work is done by scripts/patchstack/commands/refresh.py.
. "$(dirname -- "$(readlink -f -- "$0")")/patchstack/start.sh"
patchstack refresh "$@"
