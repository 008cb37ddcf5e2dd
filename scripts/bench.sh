#!/usr/bin/env bash
# Measure the fork beside the code it replaces. See --help.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
case ${1:-} in
    metadata) shift ;;
    -h | --help)
        echo "usage: bench.sh metadata [options]; options: bench.sh metadata --help"
        exit
        ;;
    *)
        echo "bench.sh: say what to measure: bench.sh metadata [options]" >&2
        exit 2
        ;;
esac
python=${PYTHON:-python3}
command -v -- "$python" >/dev/null || {
    echo "bench.sh: there is no $python: set PYTHON to the fork's Python" >&2
    exit 1
}
PYTHONPATH=$root/ci${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m bench.metadata "$@"
