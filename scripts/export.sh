#!/bin/sh
# See scripts/export.sh --help; the work is done by scripts/patchstack/commands/export.py.
. "$(dirname -- "$(readlink -f -- "$0")")/patchstack/start.sh"
patchstack export "$@"
