#!/usr/bin/env bash
# Measure the fork beside the code it replaces. See --help.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
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
        echo "bench.sh: say what to measure: bench.sh metadata|step [options]" >&2
        exit 2
        ;;
esac
python=${PYTHON:-python3}
command -v -- "$python" >/dev/null || {
    echo "bench.sh: there is no $python: set PYTHON to the fork's Python" >&2
    exit 1
}
PYTHONPATH=$root/ci${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m "bench.$what" "$@"
