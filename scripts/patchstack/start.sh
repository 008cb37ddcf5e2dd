# Sourced by scripts/*.sh: defines patchstack COMMAND ARGUMENTS.

patchstack() {
    scripts=$(dirname -- "$(readlink -f -- "$0")")
    if ! command -v python3 >/dev/null 2>&1; then
        echo "error: python3 is not installed: install Python 3.11.4 or newer" >&2
        exit 1
    fi
    if ! command -v git >/dev/null 2>&1; then
        echo "error: git is not installed: install git" >&2
        exit 1
    fi
    # The data filter of tarfile came with 3.11.4.  Our folder takes the place of
    # the user's on the path: what lies there must not be taken for our modules.
    # Neither the user's PYTHON... variables and packages (-E -s) nor their locale
    # (utf8) has a say.
    # -B: a full disk would leave half written bytecode that breaks later runs.
    exec python3 -BEs -X utf8 -c '
import sys
if sys.version_info < (3, 11, 4):
    sys.exit(
        "error: python3 is %d.%d.%d: put Python 3.11.4 or newer first on PATH"
        % sys.version_info[:3]
    )
sys.path[0] = sys.argv.pop(1)
from patchstack.__main__ import main
sys.exit(main(sys.argv[1:]))
' "$scripts" "$@"
}
