#!/usr/bin/env bash
# The fused decode-metadata launch under compute-sanitizer. See --help.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
tools=(memcheck racecheck initcheck synccheck)

usage() {
    cat <<'EOT'
usage: ci/sanitize.sh FOLDER [TOOL ...]

Runs the small launches of tests/gpu/test_decode_metadata_kernels.py under each
TOOL of compute-sanitizer and writes FOLDER/TOOL.log. Without a TOOL: memcheck,
racecheck (hazards in shared memory only), initcheck and synccheck. Fails on any
error, and on a run in which not every test passed.

Needs an NVIDIA GPU, the python3 that has vllm installed (PYTHON=... for another)
and compute-sanitizer of the CUDA toolkit: in PATH, $CUDA_HOME or /usr/local/cuda.
EOT
}

fail() {
    echo "error: $*" >&2
    exit 2
}

find_sanitizer() {
    local cuda
    command -v compute-sanitizer && return
    for cuda in ${CUDA_HOME:+"$CUDA_HOME"} /usr/local/cuda; do
        for found in "$cuda"/{bin,compute-sanitizer}/compute-sanitizer; do
            [[ -x $found ]] && echo "$found" && return
        done
    done
    return 1
}

case ${1:-} in
-h | --help)
    usage
    exit
    ;;
'' | -*)
    usage >&2
    fail "say which folder takes the logs"
    ;;
esac
folder=$1
shift
for tool in "$@"; do
    [[ " ${tools[*]} " == *" $tool "* ]] || fail "no tool '$tool': one of ${tools[*]}"
done
(($#)) && tools=("$@")
python=${PYTHON:-python3}
command -v -- "$python" >/dev/null ||
    fail "there is no $python: set PYTHON to the fork's Python"
sanitizer=$(find_sanitizer) ||
    fail "compute-sanitizer not found: install the CUDA toolkit, or set CUDA_HOME"
mkdir -p -- "$folder" || fail "cannot make $folder"
folder=$(cd -- "$folder" && pwd)

cd "$root"
# Each tensor an allocation of its own size, so that a read past it shows.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
failed=()
for tool in "${tools[@]}"; do
    echo "sanitize.sh: $tool ..." >&2
    log=$folder/$tool.log
    # Calls that return an error are the libraries' business: they probe.
    options=(--tool "$tool" --error-exitcode 1)
    [[ $tool == memcheck ]] && options+=(--report-api-errors no)
    # The summary shows that the tool saw the GPU, pytest's that tests ran there.
    if "$sanitizer" "${options[@]}" "$python" -m pytest -q -p no:cacheprovider \
        -m gpu tests/gpu/test_decode_metadata_kernels.py -k small >"$log" 2>&1 &&
        grep -Eq 'SUMMARY: 0 (errors|hazards)' "$log" &&
        grep -Eq '^[0-9]+ passed(, [0-9]+ (deselected|warnings?))* in ' "$log"; then
        echo "sanitize.sh: $tool: no errors"
    else
        echo "sanitize.sh: $tool: FAILED, see $log"
        failed+=("$tool")
    fi
done
((!${#failed[@]})) || exit 1
