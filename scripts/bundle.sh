#!/bin/sh
# See scripts/bundle.sh --help; the work is done by ci/bundle.
. "$(dirname -- "$(readlink -f -- "$0")")/../ci/start.sh"
start bundle "$@"
