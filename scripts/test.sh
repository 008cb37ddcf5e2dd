#!/usr/bin/env bash
# Lint, types and tests of the fork, in an environment this script makes for itself.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
lock=$root/ci/requirements/cpu.txt

usage() {
    cat <<'EOF'
usage: scripts/test.sh [PART] [PYTEST ARGUMENT ...]

Without a part: all but patches and gpu; with arguments, upstream is left out.

  lint      ruff, and the checks of the patch stack
  types     mypy on our own Python
  stack     tests of the patch-stack tool          (tests/patchstack)
  package   tests of the decode package            (tests/specialized_decode)
  identity  tests of what an engine reports       (tests/identity)
  run       tests of wheel, bundle, serve, bench    (tests/real_run)
  upstream  upstream's tests that guard what we touch, by the lists in
            tests/upstream, on the base and on the fork (upstream --help)
  patches   each patch at its place: its tests pass with it, and not without it
  gpu       tests that need an NVIDIA GPU          (tests/gpu), with the python3
            that has vllm installed (PYTHON=... for another)

The first run applies the stack to vllm/ and installs ci/requirements/cpu.txt
into .test-env/ (CPython 3.11; 3 GB); later runs reuse both.
EOF
}

fail() {
    echo "test.sh: $*" >&2
    exit 2
}

make_environment() {
    local stamp=$root/.test-env/lock.sha256 want
    want=$(sha256sum <"$lock")
    if [[ ! -f $stamp || $(<"$stamp") != "$want" ]]; then
        echo "test.sh: making .test-env from ci/requirements/cpu.txt" >&2
        rm -rf "$root/.test-env"
        python3 -m venv "$root/.test-env/uv" ||
            fail "python3 -m venv does not work: install python3-venv"
        "$root/.test-env/uv/bin/python" -m pip install -q --require-hashes \
            -r "$root/ci/requirements/uv.txt"
        local links=()
        mapfile -t links < <("$root/ci/requirements/find-links.sh")
        local uv=$root/.test-env/uv/bin/uv
        "$uv" venv -q --python 3.11 "$root/.test-env/cpu"
        # The CPU build of torch is on no package index but PyTorch's own, which
        # uv knows; machines that have the wheel need no index for it.
        VIRTUAL_ENV=$root/.test-env/cpu "$uv" pip install -q --require-hashes \
            "${links[@]}" -r "$lock" ||
            VIRTUAL_ENV=$root/.test-env/cpu "$uv" pip install -q --require-hashes \
                --torch-backend cpu -r "$lock"
        echo "$want" >"$stamp"
    fi
    # A moved checkout has another path, an upgraded stack another version.
    if [[ ! -f $root/.test-env/tree || $(<"$root/.test-env/tree") != "$root/vllm" ]]; then
        VIRTUAL_ENV=$root/.test-env/cpu "$root/.test-env/uv/bin/uv" pip install -q \
            --no-deps -e "$root/vllm"
        echo "$root/vllm" >"$root/.test-env/tree"
    fi
}

prepare() {
    "$root/scripts/apply.sh" >&2
    make_environment
    PATH=$root/.test-env/cpu/bin:$PATH
}

run_lint() {
    ruff check . "${own[@]}"
    ruff format --check . "${own[@]}"
    scripts/status.sh --check
}

run_types() {
    # A cache of its own: one that other selections of files fill misleads mypy.
    mypy --cache-dir .test-env/mypy scripts/patchstack ci "${own[@]}"
}

run_pytest() {
    python -m pytest -n "$(nproc)" --timeout 600 -m "not gpu" "$@"
}

run_upstream() {
    local python=$1
    shift
    PYTHONPATH=$root/ci${PYTHONPATH:+:$PYTHONPATH} "$python" -m upstream_tests "$@"
}

case ${1:-} in
-h | --help)
    usage
    exit
    ;;
lint | types | stack | package | identity | run | upstream | patches | gpu)
    part=$1
    shift
    ;;
'' | -*) part=all ;;
*)
    usage >&2
    fail "unknown part '$1'"
    ;;
esac

cd "$root"
if [[ $part == gpu ]]; then
    exec "${PYTHON:-python3}" -m pytest -m gpu tests/gpu "$@"
fi
if [[ $part == upstream && " $* " == *" --gpu "* ]]; then
    # Where a bundle was unpacked the fork lies in it.
    [[ -n ${VLLM_BUNDLE:-} ]] || "$root/scripts/apply.sh" >&2
    run_upstream "${PYTHON:-python3}" "$@"
    exit
fi
prepare
# Our own files in the tree, by their list; upstream's are upstream's to check.
mapfile -t own < <(sed -n 's,^!/\(.*\.py\)$,vllm/\1,p' vllm/.gitignore)

case $part in
lint) run_lint ;;
types) run_types ;;
stack) run_pytest tests/patchstack "$@" ;;
package) run_pytest tests/specialized_decode "$@" ;;
identity) run_pytest tests/identity "$@" ;;
run) run_pytest tests/real_run "$@" ;;
upstream) run_upstream python "$@" ;;
patches) python ci/each_patch.py "$@" ;;
all)
    run_lint
    run_types
    failed=()
    # Each in a process of its own: what vllm is when imported, a CPU build or a
    # GPU one, follows from the environment that its tests set.
    for folder in patchstack specialized_decode identity upstream real_run; do
        run_pytest "tests/$folder" "$@" || failed+=("tests/$folder")
    done
    # Arguments are pytest's, to choose among our own tests.
    (($#)) || run_upstream python || failed+=("test.sh upstream")
    if ((${#failed[@]})); then
        echo "test.sh: failed: ${failed[*]}" >&2
        exit 1
    fi
    ;;
esac
