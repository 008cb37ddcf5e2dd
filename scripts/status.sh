#!/bin/sh
# See scripts/status.sh --help; the work is done by scripts/patchstack/commands/status.py.
. "$(dirname -- "$(readlink -f -- "$0")")/patchstack/start.sh"
patchstack status "$@"
