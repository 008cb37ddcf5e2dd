"""Which calls the Hopper kernels serve, and what a layer that they serve computes.

Their products are stood in for by ``hopper.reference`` on weights in plain layout.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.model_executor.kernels import linear as upstream_linear
from vllm.model_executor.kernels.linear.mxfp8.marlin import MarlinMxfp8LinearKernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.models.deepseek_v41.attention import DeepseekV4Attention
from vllm.models.deepseek_v41.nvidia.specialized_decode.hopper import (
    binding,
    experts,
    linear,
    ops,
    output,
    reference,
    step,
)
from vllm.platforms import PlatformEnum

HIDDEN, WIDTH, EXPERTS, TOPK, LIMIT = 64, 32, 16, 4, 7.0


@pytest.fixture
def capture(monkeypatch):
    """Whether a stream captures, and into what."""
    capture = SimpleNamespace(on=True, mode=CUDAGraphMode.NONE)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capture.on)
    monkeypatch.setattr(
        step,
        "in_piecewise_cudagraph",
        lambda: capture.mode == CUDAGraphMode.PIECEWISE,
    )
    return capture


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN).bfloat16()


class TestWhichCalls:
    @pytest.mark.parametrize(("count", "small"), [(1, True), (64, True), (65, False)])
    def test_up_to_64_rows(self, capture, count, small):
        assert step.in_small_decode_graph(rows(count)) is small

    def test_no_eager_step(self, capture):
        capture.on = False
        assert not step.in_small_decode_graph(rows(1))

    def test_no_piecewise_graph(self, capture):
        capture.mode = CUDAGraphMode.PIECEWISE
        assert not step.in_small_decode_graph(rows(1))

    def test_no_empty_step(self, capture):
        assert not step.in_small_decode_graph(rows(0))

    def test_rows_that_can_be_copied_in_pieces(self):
        wide = torch.randn(4, 3 * HIDDEN).bfloat16()
        assert step.is_row_major(wide[:, HIDDEN : 2 * HIDDEN])
        assert not step.is_row_major(wide[:, 1 : HIDDEN + 1])
        assert not step.is_row_major(wide.float())
        assert not step.is_row_major(wide.T)
        assert not step.is_row_major(torch.randn(4, 12).bfloat16())


class TestLinear:
    @pytest.fixture
    def layer(self, monkeypatch):
        calls = self.calls = []
        monkeypatch.setattr(
            MarlinMxfp8LinearKernel,
            "apply_weights",
            lambda self, layer, x, bias=None: calls.append("marlin"),
        )
        monkeypatch.setattr(
            MarlinMxfp8LinearKernel,
            "process_weights_after_loading",
            lambda self, layer: None,
        )
        monkeypatch.setattr(
            ops, "linear_mxfp8", lambda x, weight, scales, n: calls.append("hopper")
        )
        return SimpleNamespace(
            weight=torch.zeros(HIDDEN // 16, 4 * 128, dtype=torch.int32),
            weight_scale=torch.full((HIDDEN // 32, 128), 120, dtype=torch.uint8),
            output_size_per_partition=96,
            input_size_per_partition=HIDDEN,
            prefix="a layer",
        )

    @pytest.fixture
    def kernel(self):
        return object.__new__(linear.HopperMxfp8LinearKernel)

    def test_small_decode_graphs_are_served(self, layer, kernel, capture):
        kernel.process_weights_after_loading(layer)
        kernel.apply_weights(layer, rows(8))
        capture.on = False
        kernel.apply_weights(layer, rows(8))
        kernel.apply_weights(layer, rows(8), bias=torch.zeros(96))
        assert self.calls == ["hopper", "marlin", "marlin"]

    def test_where_marlin_is_faster_it_serves(
        self, layer, kernel, capture, monkeypatch
    ):
        kernel.process_weights_after_loading(layer)
        monkeypatch.setattr(ops, "linear_is_faster", lambda rows, n, k: False)
        kernel.apply_weights(layer, rows(8))
        assert self.calls == ["marlin"]

    @pytest.mark.parametrize(
        "change",
        [
            {"weight_scale": torch.full((2, 128), 135, dtype=torch.uint8)},
            {"output_size_per_partition": 95},
            {"bias": torch.zeros(96)},
        ],
        ids=["a scale beyond bf16", "odd", "bias"],
    )
    def test_what_the_kernel_cannot_do_stays_with_marlin(
        self, layer, kernel, capture, change
    ):
        vars(layer).update(change)
        kernel.process_weights_after_loading(layer)
        kernel.apply_weights(layer, rows(8))
        assert self.calls == ["marlin"]

    def test_upstreams_selection_meets_it_first_and_once(self, monkeypatch):
        order = {PlatformEnum.CUDA: [MarlinMxfp8LinearKernel]}
        monkeypatch.setattr(upstream_linear, "_POSSIBLE_MXFP8_KERNELS", order)
        monkeypatch.setattr(linear, "_POSSIBLE_MXFP8_KERNELS", order)
        linear.prefer_hopper_kernel()
        linear.prefer_hopper_kernel()
        assert order[PlatformEnum.CUDA] == [
            linear.HopperMxfp8LinearKernel,
            MarlinMxfp8LinearKernel,
        ]


class Runner(MoERunner):
    """What a MoE layer of upstream's is to ours, with weights in plain layout."""

    def __init__(self, scaling: float = 2.5) -> None:
        nn.Module.__init__(self)
        method = object.__new__(Mxfp4MoEMethod)
        method.mxfp4_backend = Mxfp4MoeBackend.MARLIN
        self.w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN)
        self.w2 = torch.randn(EXPERTS, HIDDEN, WIDTH)
        codes = torch.full((EXPERTS, 1, 1), 120, dtype=torch.uint8)
        self.routed_experts = SimpleNamespace(
            quant_method=method,
            w13_weight=self.w13,
            w2_weight=self.w2,
            w13_weight_scale=codes,
            w2_weight_scale=codes,
            expert_map=None,
            apply_router_weight_on_input=False,
        )
        self.moe_config = SimpleNamespace(
            dp_size=1,
            pcp_size=1,
            is_sequence_parallel=False,
            experts_per_token=TOPK,
            hidden_dim=HIDDEN,
            activation=MoEActivation.SILU,
            intermediate_size_per_partition_unpadded=WIDTH,
            swiglu_limit=LIMIT,
        )
        self.gate = SimpleNamespace(weight=torch.randn(EXPERTS, HIDDEN).bfloat16())
        self._fse_fuse_gate = False
        self.router = SimpleNamespace(eplb_state=None, select_experts=self.choose)
        self.routed_scaling_factor = scaling
        self.shared = torch.randn(2 * WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH)
        self._shared_experts = SimpleNamespace(_layer=self.shared_mlp())
        self.stock_calls = 0

    def shared_mlp(self):
        def mlp(x):
            gate, up = (x.float() @ self.shared[0].T).chunk(2, dim=-1)
            return reference.swiglu(gate, up, LIMIT) @ self.shared[1].T

        kernel = object.__new__(linear.HopperMxfp8LinearKernel)
        kernel.serves = True
        for name, weight in zip(
            ("gate_up_proj", "down_proj"), self.shared, strict=True
        ):
            projection = SimpleNamespace(
                quant_method=SimpleNamespace(kernel=kernel),
                input_size_per_partition=weight.shape[1],
                weight=weight,
                weight_scale=None,
            )
            setattr(mlp, name, projection)
        return mlp

    def choose(self, hidden_states, router_logits, topk_indices_dtype, input_ids):
        assert topk_indices_dtype == torch.int32
        weights, ids = router_logits.softmax(-1).topk(TOPK)
        return weights, ids.int()

    def forward(self, hidden_states, router_logits, input_ids=None, shared=None):
        self.stock_calls += 1
        return hidden_states

    def _maybe_reduce_final_output(self, states, trunc_size, output_is_reduced):
        assert trunc_size is None
        assert output_is_reduced is False
        return states + 100


@pytest.fixture
def products(monkeypatch):
    """The kernels' products by their reference."""

    def grouped(x, weight, out_dtype=torch.bfloat16):
        return reference.grouped_linear(x, weight.float()).to(out_dtype)

    def gate_up(layer, x, ids):
        return layer, x, ids

    def down(layer, act, ids, weights, scale):
        made_of, x, chosen = act
        assert made_of is layer
        assert chosen is ids
        here = range(EXPERTS)
        return reference.experts(
            x,
            ids,
            weights,
            {expert: layer.w13[expert] for expert in here},
            {expert: layer.w2[expert] for expert in here},
            layer.shared_w13 and (layer.shared_w13[0], layer.shared_w2[0]),
            layer.limit,
            scale,
        )

    monkeypatch.setattr(ops, "grouped_linear_bf16", grouped)
    monkeypatch.setattr(ops.Experts, "gate_up", gate_up)
    monkeypatch.setattr(ops.Experts, "down", down)


class TestMoE:
    def expected(self, runner, x):
        logits = x.float() @ runner.gate.weight.float().T
        weights, ids = logits.softmax(-1).topk(TOPK)
        out = runner._shared_experts._layer(x)
        for row, (choices, by) in enumerate(zip(ids, weights, strict=True)):
            for expert, weight in zip(choices, by, strict=True):
                gate, up = (runner.w13[expert] @ x[row].float()).chunk(2)
                act = reference.swiglu(gate, up, LIMIT)
                out[row] += 2.5 * weight * (runner.w2[expert] @ act)
        return out + 100  # as reduced

    @pytest.mark.parametrize("fused", [True, False])
    def test_a_served_layer_is_the_whole_of_upstreams(self, capture, products, fused):
        runner, x = Runner(), rows(5)
        if not fused:
            mlp = runner._shared_experts._layer
            mlp.down_proj.input_size_per_partition = WIDTH // 2
        experts.DecodeMoE(runner).bind()
        out = runner(x, x)
        assert runner.stock_calls == 0
        torch.testing.assert_close(out, self.expected(runner, x), rtol=1e-4, atol=1e-3)

    def test_other_calls_stay_upstreams(self, capture, products):
        runner = Runner()
        experts.DecodeMoE(runner).bind()
        capture.on = False
        runner(rows(5), rows(5))
        capture.on = True
        runner(rows(65), rows(65))
        runner(rows(5), rows(5), None, rows(5))
        assert runner.stock_calls == 3

    def test_whole_experts_of_many_rows_stay_upstreams(self, capture, products):
        runner = Runner()
        runner.moe_config.intermediate_size_per_partition_unpadded = 2304
        runner._shared_experts = None
        experts.DecodeMoE(runner).bind()
        runner(rows(17), rows(17))
        assert runner.stock_calls == 1

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda r: setattr(r.routed_experts, "quant_method", 1), "not MXFP4"),
            (
                lambda r: setattr(
                    r.routed_experts.quant_method,
                    "mxfp4_backend",
                    Mxfp4MoeBackend.TRITON,
                ),
                "not Marlin",
            ),
            (lambda r: setattr(r.routed_experts, "w13_bias", 1), "a bias"),
            (lambda r: setattr(r.moe_config, "dp_size", 2), "several ranks"),
            (lambda r: setattr(r.router, "eplb_state", 1), "EPLB"),
            (lambda r: setattr(r, "gate", None), "plain linear"),
            (lambda r: setattr(r, "_fse_fuse_gate", True), "plain linear"),
            (
                lambda r: setattr(r.gate, "weight", torch.zeros(16, HIDDEN)),
                "not bf16",
            ),
            (lambda r: setattr(r.moe_config, "hidden_dim", 256), "padded from 64"),
            (
                lambda r: setattr(r.moe_config, "activation", MoEActivation.GELU),
                "no plain SwiGLU",
            ),
            (
                lambda r: setattr(
                    r.routed_experts, "apply_router_weight_on_input", True
                ),
                "no plain SwiGLU",
            ),
            (lambda r: setattr(r.moe_config, "experts_per_token", 9), "9 experts"),
            (
                lambda r: setattr(
                    r.moe_config, "intermediate_size_per_partition_unpadded", 40
                ),
                "40 is no 32s",
            ),
            (
                lambda r: r.routed_experts.w2_weight_scale.fill_(129),
                r"above 2\^1",
            ),
        ],
    )
    def test_layers_that_the_kernels_are_not_made_for(self, change, why):
        runner = Runner()
        assert experts.DecodeMoE.why_not(runner) is None
        change(runner)
        assert why in experts.DecodeMoE.why_not(runner).replace("^", r"\^")


class Attention(DeepseekV4Attention):
    n_local_heads, n_local_groups, o_lora_rank = 4, 2, 32
    nope_head_dim, rope_head_dim = 32, 32

    def __init__(self) -> None:
        nn.Module.__init__(self)
        weight = torch.randn(2 * 32, 2 * 64).bfloat16()
        self.wo_a = SimpleNamespace(weight=weight)
        self.rotary_emb = SimpleNamespace(cos_sin_cache="the cache")
        self.stock_calls = 0

    get_padded_num_q_heads = forward_mqa = None

    def _o_proj(self, attn_out, positions):
        self.stock_calls += 1

    def _wo_b_proj(self, z):
        return z


class TestOutputProjection:
    @pytest.fixture
    def rotated(self, monkeypatch):
        monkeypatch.setattr(
            ops,
            "grouped_linear_bf16",
            lambda x, weight: reference.grouped_linear(x, weight.float()),
        )

        def rotate(heads, positions, cache, n_groups, heads_per_group, **options):
            assert (n_groups, heads_per_group, cache) == (2, 2, "the cache")
            assert options == {"nope_dim": 32, "rope_dim": 32, "quantize": False}
            return -heads.reshape(heads.shape[0], n_groups, -1), None

        monkeypatch.setattr(output, "fused_inv_rope_fp8_quant", rotate)

    def test_a_served_layer_takes_its_heads_group_by_group(self, capture, rotated):
        attn = Attention()
        assert output.OutputProjection.why_not(attn) is None
        output.OutputProjection(attn).bind()
        padded = torch.randn(3, 6, 64).bfloat16()
        out = attn._o_proj(padded, torch.arange(3))
        weight = attn.wo_a.weight.float()
        heads = -padded[:, :4].float().reshape(3, 2, 128)
        expected = [
            heads[:, group] @ weight.view(2, 32, 128)[group].T for group in (0, 1)
        ]
        torch.testing.assert_close(out, torch.cat(expected, dim=1))
        assert attn.stock_calls == 0

    def test_other_calls_stay_upstreams(self, capture, rotated):
        attn = Attention()
        output.OutputProjection(attn).bind()
        attn._o_proj(torch.randn(33, 6, 64).bfloat16(), torch.arange(33))
        capture.on = False
        attn._o_proj(torch.randn(3, 6, 64).bfloat16(), torch.arange(3))
        assert attn.stock_calls == 2

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda a: setattr(a, "n_local_groups", 4), "4 groups"),
            (lambda a: setattr(a, "o_lora_rank", 24), "wo_a is (64, 128)"),
            (
                lambda a: setattr(a.wo_a, "weight", torch.zeros(64, 128)),
                "torch.float32",
            ),
        ],
    )
    def test_layers_that_the_kernel_is_not_made_for(self, change, why):
        attn = Attention()
        change(attn)
        assert why in output.OutputProjection.why_not(attn)


def test_all_layers_are_bound_and_those_that_are_not_are_told(monkeypatch):
    lines = []
    monkeypatch.setattr(
        binding.logger, "info_once", lambda text, *args: lines.append(text % args)
    )
    served, moved = Runner(), Runner()
    moved.router.eplb_state = object()
    attn = Attention()
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"a": served, "b": attn, "c": moved, "d": object()}
        )
    )
    binding.bind_kernels(config)
    assert isinstance(vars(served)["forward"], experts.DecodeMoE)
    assert isinstance(vars(attn)["_o_proj"], output.OutputProjection)
    assert "forward" not in vars(moved)
    assert lines == [
        "DeepSeek-V4.1 decode: Hopper kernels in FULL graphs of up to 64 rows, for "
        "MXFP8 linear layers, the experts of 1 layers, the output projection of 1 "
        "layers.",
        "DeepSeek-V4.1 decode: upstream's experts in 1 layers: its experts move "
        "(EPLB).",
    ]
