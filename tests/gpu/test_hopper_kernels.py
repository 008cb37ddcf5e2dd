"""The Hopper kernels against float64, upstream's kernels and themselves."""

import math

import pytest
import torch
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
    apply_mxfp8_marlin_linear,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.hopper import (
    layout,
    ops,
    reference,
)
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (current_platform.is_cuda() and current_platform.is_device_capability(90)),
        reason="the kernels are for SM90",
    ),
]

ROWS = (1, 2, 5, 8, 9, 16, 17, 33, 64)
# (N, K): a rank of 8's and a whole layer's projections, narrow and odd ones.
LINEAR_SHAPES = {
    "wq_a+wkv": (1792, 5120),
    "wq_b of 8": (4096, 1280),
    "wo_b of 8": (5120, 1024),
    "gate_up of 8": (576, 5120),
    "down of 8": (5120, 288),
    "wq_b of 2": (16384, 1280),
    "wo_b": (5120, 8192),
    "down of 4": (5120, 576),
    "smallest": (64, 32),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def random_words(*shape: int) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31, shape, device="cuda", dtype=torch.int64)
    return words.to(torch.int32)


def mxfp8(n: int, k: int, low: int = 112, high: int = 122):
    words = random_words(k // 16, 4 * n)
    codes = words.view(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x30  # NaN
    scales = torch.randint(low, high, (k // 32, n), device="cuda", dtype=torch.uint8)
    return words, scales


def mxfp4(experts: int, n: int, k: int, low: int = 116, high: int = 124):
    words = random_words(experts, k // 16, 2 * n)
    scales = torch.randint(
        low, high, (experts, k // 32, n), device="cuda", dtype=torch.uint8
    )
    return words, scales


def bf16(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * spread).bfloat16()


@pytest.mark.parametrize("shape", LINEAR_SHAPES.values(), ids=LINEAR_SHAPES)
def test_linear_is_as_exact_as_marlin(shape):
    n, k = shape
    words, scales = mxfp8(n, k)
    weight = layout.dequantized(words, scales, 8, torch.float64)
    for rows in ROWS:
        x = bf16(rows, k)
        exact = reference.linear(x, weight)
        ours = error(ops.linear_mxfp8(x, words, scales, n), exact)
        # Rounding to bf16, which so few outputs do not average out.
        assert ours < (0.0018 if n * rows > 500 else 0.004), rows
        if n % 64 or k % 128:
            continue  # Marlin wants such layers padded
        marlin = error(
            apply_mxfp8_marlin_linear(
                x, words, scales.view(torch.float8_e8m0fnu), None, n, k
            ),
            exact,
        )
        # Both round to bf16 last, which is nearly all of the error.
        assert ours <= 1.03 * marlin, (rows, ours, marlin)


def test_linear_at_the_bounds_of_its_formats():
    n, k = 128, 256
    # Every e4m3 code but NaN, subnormals and both zeros among them.
    words, scales = mxfp8(n, k, low=0, high=ops.MAX_MXFP8_SCALE + 1)
    scales[0], scales[1] = 0, ops.MAX_MXFP8_SCALE
    weight = layout.dequantized(words, scales, 8, torch.float64)
    # The scales of a row differ by 2^134: one group at a time is compared.
    for group in range(k // 32):
        x = torch.zeros(4, k, device="cuda", dtype=torch.bfloat16)
        x[:, 32 * group : 32 * group + 32] = bf16(4, 32)
        exact = reference.linear(x, weight)
        out = ops.linear_mxfp8(x, words, scales, n).double()
        tiny = exact.abs() < 2.0**-120  # below, bf16 has subnormals
        torch.testing.assert_close(out[~tiny], exact[~tiny], rtol=0.004, atol=0)
        assert ((out - exact).abs()[tiny] < 2.0**-126).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    n, k = 192, 320
    words, scales = mxfp8(n, k)
    x = bf16(11, k)
    clean = ops.linear_mxfp8(x, words, scales, n)
    x[3, 77] = bad
    out = ops.linear_mxfp8(x, words, scales, n)
    assert not out[3].isfinite().any()
    keep = [row for row in range(11) if row != 3]
    assert torch.equal(out[keep], clean[keep])


def test_linear_of_padded_n_writes_what_is_asked_for():
    words, scales = mxfp8(128, 256)
    x = bf16(7, 256)
    whole = ops.linear_mxfp8(x, words, scales, 128)
    assert torch.equal(ops.linear_mxfp8(x, words, scales, 96), whole[:, :96])


def test_padding_of_k_is_not_read():
    words, scales = mxfp8(128, 320)
    x = bf16(7, 288)
    expected = ops.linear_mxfp8(x, words[:18], scales[:9], 128)
    words[18:], scales[9:] = -1, 255
    assert torch.equal(ops.linear_mxfp8(x, words, scales, 128), expected)


def test_linear_takes_rows_of_a_wider_tensor():
    words, scales = mxfp8(128, 256)
    wide = bf16(9, 512)
    assert torch.equal(
        ops.linear_mxfp8(wide[:, 256:], words, scales, 128),
        ops.linear_mxfp8(wide[:, 256:].contiguous(), words, scales, 128),
    )


@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 12, 40])
def test_every_split_of_k_is_exact(split, rows):
    words, scales = mxfp8(320, 2080)
    x = bf16(rows, 2080)
    exact = reference.linear(x, layout.dequantized(words, scales, 8, torch.float64))
    assert error(ops.linear_mxfp8(x, words, scales, 320, split), exact) < 0.0018


@pytest.mark.parametrize(
    ("groups", "n", "k", "dtype", "bound"),
    [
        (1, 1024, 4096, torch.bfloat16, 0.0018),
        (2, 1024, 4096, torch.bfloat16, 0.0018),
        (1, 384, 5120, torch.float32, 1e-6),
        (3, 16, 32, torch.float32, 1e-6),
    ],
    ids=["wo_a of 8", "wo_a of 4", "router", "smallest"],
)
def test_grouped_linear(groups, n, k, dtype, bound):
    weight = bf16(groups, n, k)
    for rows in ROWS:
        x = bf16(rows, groups, k)
        out = ops.grouped_linear_bf16(x, weight, dtype)
        exact = reference.grouped_linear(x, weight.double())
        assert out.dtype == dtype
        assert error(out, exact) < bound, rows


LIMIT = 10.0


class Layer:
    """Experts of one rank, with weights in float64 of those that a test asks for."""

    def __init__(self, experts: int, width: int, padded: int, shared: bool = True):
        self.hidden = 512
        self.width = width
        w13, w13_scales = mxfp4(experts, 2 * padded, self.hidden)
        w2, w2_scales = mxfp4(experts, self.hidden, padded)
        self.shared = (mxfp8(2 * width, self.hidden), mxfp8(self.hidden, width))
        self.experts = ops.Experts(
            w13,
            w13_scales,
            w2,
            w2_scales,
            *(self.shared if shared else (None, None)),
            width,
            LIMIT,
        )
        self.padded = padded

    def weights(self, local: int):
        ours = self.experts
        w13 = layout.dequantized(
            ours.w13[local], ours.w13_scales[local], 4, torch.float64
        )
        w2 = layout.dequantized(ours.w2[local], ours.w2_scales[local], 4, torch.float64)
        width, padded = self.width, self.padded
        return (
            torch.cat([w13[:width], w13[padded : padded + width]]),
            w2[:, :width],
        )

    def exact(self, x, ids, weights, scale, local=lambda expert: expert):
        here = {
            expert: self.weights(local(expert))
            for expert in set(ids.flatten().tolist())
            if expert >= 0 and local(expert) >= 0
        }
        shared = None
        if self.experts.shared_w13 is not None:
            shared = tuple(
                layout.dequantized(*each, 8, torch.float64) for each in self.shared
            )
        return reference.experts(
            x,
            ids,
            weights,
            {expert: pair[0] for expert, pair in here.items()},
            {expert: pair[1] for expert, pair in here.items()},
            shared,
            LIMIT,
            scale,
        )

    def run(self, x, ids, weights, scale):
        return self.experts.down(self.experts.gate_up(x, ids), ids, weights, scale)


def choices(rows: int, experts: int, topk: int = 6) -> torch.Tensor:
    each = [torch.randperm(experts, device="cuda")[:topk] for _ in range(rows)]
    return torch.stack(each).int()


@pytest.mark.parametrize(
    ("width", "padded"),
    [(288, 384), (576, 640), (1152, 1152), (2304, 2304), (32, 128)],
    ids=["of 8", "of 4", "of 2", "whole", "narrow"],
)
def test_experts(width, padded):
    layer = Layer(16, width, padded)
    for rows in ROWS:
        x, ids = bf16(rows, layer.hidden, spread=0.3), choices(rows, 16)
        weights = torch.rand(rows, 6, device="cuda")
        exact = layer.exact(x, ids, weights, 2.5)
        assert error(layer.run(x, ids, weights, 2.5), exact) < 0.003, rows


def test_experts_are_as_exact_as_marlin():
    layer = Layer(24, 384, 384, shared=False)
    ours = layer.experts
    for rows in (1, 8, 40):
        x, ids = bf16(rows, layer.hidden, spread=0.3), choices(rows, 24)
        weights = torch.rand(rows, 6, device="cuda")
        exact = layer.exact(x, ids, weights, 1.0)

        def clamped(activation, out, gate_up, **_):
            gate, up = gate_up.chunk(2, dim=-1)
            out.copy_(reference.swiglu(gate.float(), up.float(), LIMIT))

        marlin = fused_marlin_moe(
            x,
            ours.w13,
            ours.w2,
            None,
            None,
            ours.w13_scales.view(torch.float8_e8m0fnu),
            ours.w2_scales.view(torch.float8_e8m0fnu),
            weights,
            ids,
            scalar_types.float4_e2m1f.id,
            global_num_experts=24,
            activation_func=clamped,
        )
        assert error(layer.run(x, ids, weights, 1.0), exact) <= error(marlin, exact)


def test_experts_of_other_ranks_and_padding_add_nothing():
    layer = Layer(6, 64, 128)
    local = torch.full((48,), -1, dtype=torch.int32, device="cuda")
    local[12:18] = torch.arange(6, device="cuda", dtype=torch.int32)
    object.__setattr__(layer.experts, "local_expert", local)
    x, ids = bf16(30, layer.hidden, spread=0.3), choices(30, 48)
    ids[4] = -1  # a padding row
    ids[7] = torch.arange(30, 36)  # nothing here
    weights = torch.rand(30, 6, device="cuda")
    exact = layer.exact(
        x, ids, weights, 1.0, lambda expert: expert - 12 if 12 <= expert < 18 else -1
    )
    # What a choice without an expert leaves behind is never read.
    poison = torch.full((1 << 22,), math.nan, device="cuda")
    del poison
    out = layer.run(x, ids, weights, 1.0)
    assert error(out, exact) < 0.003
    alone = layer.run(x[4:5], ids[4:5], weights[4:5], 1.0)
    assert torch.equal(out[4:5], alone)


def test_one_expert_for_every_row():
    layer = Layer(8, 288, 384)
    ids = torch.arange(6, device="cuda", dtype=torch.int32).repeat(64, 1)
    x, weights = bf16(64, layer.hidden, spread=0.3), torch.rand(64, 6, device="cuda")
    exact = layer.exact(x, ids, weights, 1.0)
    assert error(layer.run(x, ids, weights, 1.0), exact) < 0.003


@pytest.mark.parametrize("rows", [1, 6, 64])
def test_captured_in_a_row_they_are_right_and_equal_each_time(rows):
    """The kernels start before those ahead of them end: a graph of dependent ones,
    whose buffers are poisoned in between.
    """
    layer = Layer(384, 288, 384)
    first, second = mxfp8(layer.hidden, layer.hidden), mxfp8(layer.hidden, layer.hidden)
    router = bf16(1, 384, layer.hidden)
    x = bf16(rows, layer.hidden, spread=0.2)

    def step() -> torch.Tensor:
        hidden = ops.linear_mxfp8(x, *first, layer.hidden)
        hidden = ops.linear_mxfp8(hidden, *second, layer.hidden)
        hidden = torch.nn.functional.rms_norm(hidden, (layer.hidden,))
        logits = ops.grouped_linear_bf16(hidden[:, None], router, torch.float32)[:, 0]
        weights, ids = logits.softmax(-1).topk(6)
        out = hidden
        for _ in range(3):
            out = layer.run(out, ids.int(), weights, 1.0)
            out = torch.nn.functional.rms_norm(out, (layer.hidden,))
        return out

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    expected = step()
    with torch.cuda.graph(graph):
        out = step()
    for turn in range(1000):
        if turn % 100 == 0:
            out.fill_(math.nan)
        graph.replay()
        if turn % 50 == 0:
            assert torch.equal(out, expected), turn
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
