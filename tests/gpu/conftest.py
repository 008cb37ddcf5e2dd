"""A real engine on a GPU: the 8-layer proxy of DeepSeek-V4.1, in this process."""

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "ci"))

# Before vllm is imported: the model runner must be within reach, and nothing may
# need the network.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def pytest_addoption(parser):
    parser.addoption(
        "--query-len",
        type=int,
        default=1,
        help="tokens a request decodes per step; above 1 with DSpark",
    )
    parser.addoption(
        "--adaptive",
        action="store_true",
        help="with adaptive verification; needs a --query-len above 1",
    )
    parser.addoption("--soak", type=int, default=1000, help="steps of the soak test")
    parser.addoption("--layers", type=int, default=8, choices=(8, 40))


@pytest.fixture(scope="session")
def query_len(request) -> int:
    return request.config.getoption("--query-len")


@pytest.fixture(scope="session")
def adaptive(request, query_len) -> bool:
    adaptive = request.config.getoption("--adaptive")
    if adaptive and query_len == 1:
        pytest.fail("--adaptive needs a --query-len above 1")
    return adaptive


@pytest.fixture(scope="session")
def profiled():
    """How many recordings memory profiling held before and after its end."""
    return []


@pytest.fixture(scope="session")
def engine(request, query_len, adaptive, profiled, tmp_path_factory):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from proxy_model import engine as proxy_engine
    from proxy_model.write import write
    from vllm.v1.worker.gpu import cudagraph_utils

    teardown = cudagraph_utils._teardown_profiling_state

    def watched(runner):
        before = len(runner.model_state.graphs)
        teardown(runner)
        profiled.append((before, len(runner.model_state.graphs)))

    cudagraph_utils._teardown_profiling_state = watched
    model = tmp_path_factory.mktemp("proxy")
    write(model, request.config.getoption("--layers"))
    return proxy_engine.make(
        str(model),
        query_len,
        decode_backend="latency_specialized",
        dspark={"enable_adaptive_verification": adaptive},
        max_model_len=4096,
        # Small enough for copies and checksums of all of it.
        num_gpu_blocks_override=4096,
        gpu_memory_utilization=0.5,
    )


@pytest.fixture(scope="session")
def runner(engine):
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner
