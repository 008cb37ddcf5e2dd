# SPDX-License-Identifier: Apache-2.0
"""The MoE of decode steps: router, routed and shared experts, their sum.

Four launches stand for upstream's fourteen: the router's logits, the experts' two
halves, of which the first chooses the experts, and the sum. Above
``ops.MAX_CHOSEN_ROWS`` rows, or where a router has more to say, upstream's own choice
is a fifth.
"""

import math

import torch
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import (
    FusedTopKBiasRouter,
    _get_padding_mask,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

from . import ops
from .linear import HopperMxfp8LinearKernel
from .step import in_small_decode_graph, is_row_major


def _why_not(runner: MoERunner) -> str | None:
    """Why a layer keeps upstream's experts, or None if it does not. Waits for the
    device."""
    config = runner.moe_config
    experts = runner.routed_experts
    method = experts.quant_method
    if not isinstance(method, Mxfp4MoEMethod):
        return f"its experts are of {type(method).__name__}, not MXFP4"
    if method.mxfp4_backend != Mxfp4MoeBackend.MARLIN:
        return f"its experts run on {method.mxfp4_backend.value}, not Marlin"
    if getattr(experts, "w13_bias", None) is not None:
        return "its experts have a bias"
    if config.dp_size > 1 or config.is_sequence_parallel or config.pcp_size > 1:
        return "its tokens come from several ranks"
    if runner.router.eplb_state is not None:
        return "its experts move (EPLB)"
    if runner.gate is None or runner._fse_fuse_gate:
        return "its router is not a plain linear layer"
    if runner.gate.weight.dtype != torch.bfloat16 or runner.gate.weight.shape[0] % 16:
        return f"its router is {tuple(runner.gate.weight.shape)}, not bf16 in whole 16s"
    if config.experts_per_token > ops.MAX_TOPK:
        return f"a token has {config.experts_per_token} experts"
    if config.intermediate_size_per_partition_unpadded % ops.GROUP:
        return f"its width {config.intermediate_size_per_partition_unpadded} is no 32s"
    for scales in (experts.w13_weight_scale, experts.w2_weight_scale):
        if int(scales.view(torch.uint8).max()) > ops.MAX_MXFP4_SCALE:
            return f"a scale is above 2^{ops.MAX_MXFP4_SCALE - 127}"
    return None


def _fused_shared(
    runner: MoERunner, intermediate: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    """Weights and scales of the shared expert's two projections where it has the width
    of the routed ones and runs in their launches, else None."""
    shared = runner.shared_experts
    if shared is None:
        return None
    mlp = shared._layer
    layers = (mlp.gate_up_proj, mlp.down_proj)
    if layers[1].input_size_per_partition != intermediate or not all(
        isinstance(
            kernel := getattr(layer.quant_method, "kernel", None),
            HopperMxfp8LinearKernel,
        )
        and kernel.serves
        for layer in layers
    ):
        return None
    first, second = ((layer.weight, layer.weight_scale) for layer in layers)
    return first, second


class DecodeMoE:
    """``runner.forward`` by the kernels of ``ops`` in small decode graphs."""

    def __init__(self, runner: MoERunner) -> None:
        self._runner = runner
        self._stock = runner.forward
        experts = runner.routed_experts
        config = runner.moe_config
        intermediate = config.intermediate_size_per_partition_unpadded
        limit = config.swiglu_limit
        # Marlin was faster at more rows of wide experts, on an H200.
        self._max_rows = 64 if intermediate <= 1152 else 16
        self._shared = _fused_shared(runner, intermediate)
        self._experts = ops.Experts(
            experts.w13_weight,
            experts.w13_weight_scale,
            experts.w2_weight,
            experts.w2_weight_scale,
            *(self._shared or (None, None)),
            intermediate,
            math.inf if limit is None else float(limit),
            experts.expert_map,
        )

    why_not = staticmethod(_why_not)

    def bind(self) -> None:
        """Serve the layer from now on."""
        self._runner.forward = self

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``hidden_states`` [M, hidden] bf16 as [M, hidden] bf16, reduced over the TP
        group as upstream would; the router runs here, as in upstream's runner."""
        if (
            shared_experts_input is not None
            or hidden_states.shape[0] > self._max_rows
            or not is_row_major(hidden_states)
            or not in_small_decode_graph(hidden_states)
        ):
            return self._stock(
                hidden_states, router_logits, input_ids, shared_experts_input
            )
        routing = self.route(hidden_states, input_ids)
        act = self._experts.gate_up(hidden_states, routing)
        runner = self._runner
        out = self._experts.down(act, routing, runner.routed_scaling_factor)
        shared = runner.shared_experts
        if shared is not None and self._shared is None:
            out += shared._layer(hidden_states)
        return runner._maybe_reduce_final_output(out, None, False)

    def route(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None
    ) -> ops.Routing:
        """The experts of each row of ``hidden_states`` [M, hidden], or their choice."""
        runner = self._runner
        assert runner.gate is not None
        logits = ops.grouped_linear_bf16(
            hidden_states.unsqueeze(1), runner.gate.weight.unsqueeze(0), torch.float32
        ).squeeze(1)
        router = runner.router
        if hidden_states.shape[0] <= ops.MAX_CHOSEN_ROWS and _chooses_plainly(router):
            assert router.e_score_correction_bias is not None
            return ops.Routing.by(
                ops.Choice(
                    logits,
                    router.top_k,
                    router.e_score_correction_bias,
                    router.routed_scaling_factor,
                    router.bias_vl if router.image_sentinel_lo > 0 else None,
                    input_ids,
                    router.image_sentinel_lo,
                    _get_padding_mask(logits.shape[0]),
                )
            )
        weights, ids = router.select_experts(
            hidden_states=hidden_states,
            router_logits=logits,
            topk_indices_dtype=torch.int32,
            input_ids=input_ids,
        )
        return ops.Routing(ids, weights)


def _chooses_plainly(router: FusedMoERouter) -> bool:
    """Whether ``ops.Choice`` is all that a router does. No one must be watching it."""
    return (
        type(router) is FusedTopKBiasRouter
        and router.scoring_func == "sqrtsoftplus"
        and router.renormalize
        and router.e_score_correction_bias is not None
        and router._hash_indices_table is None
        and router.num_fused_shared_experts == 0
        and router.eplb_state is None
        and router.capture_fn is None
        and router._routing_replay_out is None
    )
