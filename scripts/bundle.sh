#!/usr/bin/env bash
# Pack the fork for a GPU machine without a network. See --help.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "bundle.sh: Python 3.11 or newer is needed: set PYTHON to one" >&2
    exit 1
fi
PYTHONPATH="$root/ci" exec "$python" -m bundle "$@"
