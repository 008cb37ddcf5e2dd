#!/bin/sh
# Measure the fork beside the code it replaces. See --help.
. "$(dirname -- "$(readlink -f -- "$0")")/../ci/start.sh"
what=${1:-}
case $what in
    metadata | step) shift ;;
    -h | --help)
        cat <<'TEXT'
usage: bench.sh metadata|step [options]

  metadata  the metadata build of decode steps, by each way of building it
  step      decode steps by decode_backend, and the parts of a step

Options: bench.sh metadata --help, bench.sh step --help
TEXT
        exit
        ;;
    *)
        echo "error: say what to measure: bench.sh metadata|step [options]" >&2
        exit 2
        ;;
esac
start "bench.$what" "$@"
