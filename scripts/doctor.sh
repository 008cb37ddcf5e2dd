#!/bin/sh
# See scripts/doctor.sh --help; the work is done by scripts/patchstack/commands/doctor.py.
. "$(dirname -- "$(readlink -f -- "$0")")/patchstack/start.sh"
patchstack doctor "$@"
