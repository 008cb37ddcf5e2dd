"""The fused decode-metadata launch on the device, against its reference in plain
torch, bitwise, and nothing written beside its outputs.
"""

import pytest
import torch
from decode_metadata_cases import Shape, assert_same, random_case
from decode_metadata_reference import schedule
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.kernel import (
    Kind,
)
from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
MAX_NUM_REQS = 256
MAX_WINDOW = 128
KERNEL = "_decode_metadata_kernel"

# Few programs, for compute-sanitizer.
SMALL = (
    Shape(num_reqs=1, num_tokens=1, columns=9),
    Shape(num_reqs=3, num_tokens=7, columns=300),
    Shape(num_reqs=8, num_tokens=48, columns=33),
)
LARGE = (
    Shape(num_reqs=1, num_tokens=6, columns=16384),
    Shape(num_reqs=32, num_tokens=192, columns=16384),
    Shape(num_reqs=256, num_tokens=256, columns=2048),
    Shape(num_reqs=256, num_tokens=1024, columns=2048),
    Shape(num_reqs=255, num_tokens=1023, columns=257),
)
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def check_launches(shape: Shape, seed: int) -> None:
    for step in range(STEPS):
        case = random_case(shape, seed, step)
        on_device = case.to(DEVICE)
        on_device.launcher(MAX_NUM_REQS, MAX_WINDOW)()
        assert_same(case.expected(), on_device)


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small_launches_equal_the_reference(shape):
    check_launches(shape, seed=1)


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_launches_equal_the_reference(shape):
    check_launches(shape, seed=2)


def test_the_widest_tables_equal_the_reference():
    """16384 columns for as many requests and tokens as there can be."""
    shape = Shape(num_reqs=256, num_tokens=1024, columns=16384)
    for kind in (Kind.TABLE, Kind.TOKEN_TABLE):
        case = random_case(shape, seed=3, kinds=[kind])
        on_device = case.to(DEVICE)
        on_device.launcher(MAX_NUM_REQS, MAX_WINDOW)()
        assert_same(case.expected(), on_device)


@pytest.mark.parametrize("item_tokens", [1, 2, 4])
def test_schedules_are_those_of_deepgemm(item_tokens):
    """What the reference promises is what the kernel of the indexer's logits takes."""
    if not current_platform.is_device_capability_family(90):
        pytest.skip("other architectures share the work out otherwise")
    workers = num_compute_units() // (2 if item_tokens == 4 else 1)
    random = torch.Generator().manual_seed(item_tokens)
    for items in (1, 2, 31, 32, 33, 192, 1024):
        for longest in (1, 300, 8192, 2**20):
            lens = torch.randint(0, longest, (items, item_tokens), generator=random)
            # Requests that hold nothing yet, and none that holds anything.
            for share in (0.0, 0.5, 1.0):
                lens[torch.rand(items, generator=random) < share] = 0
                units = -(-lens[:, -1] // 256)
                got = get_paged_mqa_logits_metadata(
                    lens.int().to(DEVICE), 64, num_compute_units()
                )
                assert torch.equal(got.cpu(), schedule(units, workers).int())


@pytest.mark.parametrize("shape", [SMALL[1], LARGE[3]], ids=str)
def test_a_replayed_graph_follows_its_inputs(shape):
    seed = 4
    case = random_case(shape, seed).to(DEVICE)
    launch = case.launcher(MAX_NUM_REQS, MAX_WINDOW)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for step in range(1, 9):
        wanted = random_case(shape, seed, step)
        case.load(wanted)
        graph.replay()
        assert_same(wanted.expected(), case)


def test_all_shapes_run_one_compiled_kernel(monkeypatch):
    """A compile while serving would stall a step, and one in a capture fail it."""
    compiled = []

    def note(*, fn, **_):
        if fn.name.endswith(KERNEL):
            compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    # Bounds that no other test has compiled for.
    for shape in (*SMALL, LARGE[0], LARGE[4]):
        random_case(shape, seed=5).to(DEVICE).launcher(MAX_NUM_REQS, 2 * MAX_WINDOW)()
    assert len(compiled) == 1
    random_case(SMALL[0], seed=5).to(DEVICE).launcher(MAX_NUM_REQS, 4 * MAX_WINDOW)()
    torch.accelerator.synchronize()
    # The hook does see a second one.
    assert len(compiled) == 2
