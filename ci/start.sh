# Sourced by scripts/*.sh: defines start MODULE ARGUMENTS, which runs a module of ci/
# with $PYTHON (default: python3).

start() {
    root=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' 2>/dev/null; then
        echo "error: $python is not Python 3.11.4 or newer: set PYTHON to one" >&2
        exit 2
    fi
    PYTHONPATH=$root/ci${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m "$@"
}
