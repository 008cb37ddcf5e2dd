#!/bin/sh
# See scripts/wheel.sh --help; the work is done by ci/fork_wheel.
. "$(dirname -- "$(readlink -f -- "$0")")/../ci/start.sh"
start fork_wheel "$@"
