#!/usr/bin/env bash
# Serve DeepSeek-V4.1 from the fork: `vllm serve` with defaults for the model.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)

usage() {
    cat <<'TEXT'
usage: serve.sh [--proxy 40|8 [--rank-of 1|2|4|8 [--expert-parallel]]]
                [--python PY] [--dry-run] [MODEL] [vllm serve options]

Starts the OpenAI-compatible server of the fork. Every other option goes to
`vllm serve` and wins over the defaults set here: an fp8 KV cache, CUDA graphs
FULL_AND_PIECEWISE, V4.1's tokenizer and parsers, decode_backend auto.

  --proxy 40|8   a model with V4.1's shapes, 40 or 8 layers deep, without weights
  --rank-of N    the proxy has the shapes of one of N tensor-parallel ranks: its
                 part of the heads, output groups and expert widths, and all 384
                 experts or, said at start-up, as many as the GPU holds. It leaves
                 out the all-reduces; embedding and lm_head are not divided
  --expert-parallel  of a proxy of one of N ranks: it has a part of the experts,
                 whole ones, and computes those of a token's 6 that it has
  --python PY    the Python that the fork is installed in (default: python3)
  --dry-run      print the command and leave
TEXT
}

fail() {
    echo "serve.sh: $*" >&2
    exit 1
}

python=${PYTHON:-python3}
proxy=
rank_of=
expert_parallel=
dry_run=
rest=()
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --proxy | --rank-of | --python)
            (($# > 1)) || fail "$1 needs a value; see --help"
            case $1 in
                --proxy) proxy=$2 ;;
                --rank-of) rank_of=$2 ;;
                --python) python=$2 ;;
            esac
            shift
            ;;
        --proxy=*) proxy=${1#*=} ;;
        --rank-of=*) rank_of=${1#*=} ;;
        --python=*) python=${1#*=} ;;
        --dry-run) dry_run=1 ;;
        --expert-parallel) expert_parallel=1 ;;
        *) rest+=("$1") ;;
    esac
    shift
done

# One of ours, unless the caller gives that option.
options=()
default() {
    local given
    for given in "${rest[@]}"; do
        case $given in "$1" | "$1="* | "$1."*) return ;; esac
    done
    options+=("$@")
}
default --kv-cache-dtype fp8
default --compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'
default --additional-config '{"decode_backend": "auto"}'
default --tokenizer-mode deepseek_v41
default --tool-call-parser deepseek_v41
default --enable-auto-tool-choice
default --reasoning-parser deepseek_v41
model=()
shapes=()
if [[ -n $proxy ]]; then
    [[ $proxy == 40 || $proxy == 8 ]] || fail "--proxy $proxy: choose 40 or 8"
    name=proxy-$proxy
    shapes=(--layers "$proxy")
    if [[ -n $rank_of ]]; then
        [[ $rank_of == [1248] ]] || fail "--rank-of $rank_of: choose 1, 2, 4 or 8"
        name+=-rank-of-$rank_of
        shapes+=(--rank-of "$rank_of")
    fi
    if [[ -n $expert_parallel ]]; then
        [[ $rank_of == [248] ]] || fail "--expert-parallel needs --rank-of 2, 4 or 8"
        name+=-expert-parallel
        shapes+=(--expert-parallel)
        default --worker-cls proxy_model.expert_parallel.Worker
    fi
    [[ -n ${XDG_CACHE_HOME:-}${HOME:-} ]] ||
        fail "set HOME or XDG_CACHE_HOME: the proxy's files are written below it"
    folder=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-dsv41/$name
    model=("$folder")
    default --load-format dummy
    default --limit-mm-per-prompt '{"image": 0}'
    default --max-model-len 8192
    default --max-num-seqs 32
    # All the experts of a rank need most of a GPU.
    default --gpu-memory-utilization "$([[ -n $rank_of ]] && echo 0.9 || echo 0.7)"
    default --served-model-name "dsv41-$name"
elif [[ -n $rank_of$expert_parallel ]]; then
    fail "--rank-of and --expert-parallel are a proxy's: give --proxy 40 or 8 too"
elif ((${#rest[@]} == 0)); then
    fail "give a model, as for 'vllm serve', or --proxy 40; see --help"
fi
command=(
    "$python" -m vllm.entrypoints.cli.main serve
    "${model[@]}" "${options[@]}" "${rest[@]}"
)

if [[ -n $dry_run ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi

command -v -- "$python" >/dev/null || fail "--python $python: there is no such program"
# Where vllm would be imported from, without importing it.
where=$("$python" -c '
import importlib.util
spec = importlib.util.find_spec("vllm")
print(spec.origin or "" if spec else "")
' 2>/dev/null) || where=
if [[ -z $where || ! -f $(dirname -- "$where")/../.stack.json ]]; then
    [[ -f $root/vllm/.stack.json ]] ||
        fail "the fork is not applied: run scripts/apply.sh, then 'pip install -e vllm'"
    [[ -n $where ]] || fail "$python has no vllm: run 'pip install -e vllm'"
    fail "$python imports another vLLM, $where: run 'pip install -e vllm' or give --python"
fi

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "serve.sh: no NVIDIA GPU here: run this on a GPU node" >&2
    "$python" -c '
from vllm.models.deepseek_v41.nvidia.specialized_decode import deployment
print("this deployment would get:", deployment.describe_platform())
' 2>/dev/null || echo "this deployment would get: nothing, the package cannot be imported"
    exit 1
fi

if [[ -n $proxy ]]; then
    # The engine of an expert-parallel rank imports from here too.
    export PYTHONPATH=$root/ci${PYTHONPATH:+:$PYTHONPATH}
    "$python" -m proxy_model.write "${shapes[@]}" --out "$folder"
fi
exec "${command[@]}"
