# SPDX-License-Identifier: Apache-2.0
"""The MoE of decode steps: router, routed and shared experts, their sum.

Five launches stand for upstream's fourteen: the router's logits, upstream's own choice
of experts (it knows image tokens and padding), both halves of the experts, the sum.
"""

import math
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

from . import ops
from .linear import HopperMxfp8LinearKernel
from .step import in_small_decode_graph, is_row_major


def _why_not(runner: MoERunner) -> str | None:
    """Why a layer keeps upstream's experts, or None if it does not.

    Waits for the device.
    """
    return (
        _why_not_its_placement(runner)
        or _why_not_its_router(runner)
        or _why_not_its_experts(runner)
    )


def _why_not_its_placement(runner: MoERunner) -> str | None:
    config = runner.moe_config
    if config.dp_size > 1 or config.is_sequence_parallel or config.pcp_size > 1:
        return "its tokens come from several ranks"
    if runner.router.eplb_state is not None:
        return "its experts move (EPLB)"
    return None


def _why_not_its_router(runner: MoERunner) -> str | None:
    gate: Any = runner.gate
    if gate is None or runner._fse_fuse_gate:
        return "its router is not a plain linear layer"
    if gate.weight.dtype != torch.bfloat16 or gate.weight.shape[0] % 16:
        return f"its router is {tuple(gate.weight.shape)}, not bf16 in whole 16s"
    hidden = runner.moe_config.hidden_dim
    if gate.weight.shape[1] != hidden:
        return f"its rows are padded from {gate.weight.shape[1]} to {hidden}"
    return None


def _why_not_its_experts(runner: MoERunner) -> str | None:
    experts: Any = runner.routed_experts
    return _why_not_their_method(experts) or _why_not_their_shape(runner, experts)


def _why_not_their_method(experts: Any) -> str | None:
    method = experts.quant_method
    if not isinstance(method, Mxfp4MoEMethod):
        return f"its experts are of {type(method).__name__}, not MXFP4"
    if method.mxfp4_backend != Mxfp4MoeBackend.MARLIN:
        return f"its experts run on {method.mxfp4_backend.value}, not Marlin"
    if getattr(experts, "w13_bias", None) is not None:
        return "its experts have a bias"
    for scales in (experts.w13_weight_scale, experts.w2_weight_scale):
        if int(scales.view(torch.uint8).max()) > ops.MAX_MXFP4_SCALE:
            return f"a scale is above 2^{ops.MAX_MXFP4_SCALE - 127}"
    return None


def _why_not_their_shape(runner: MoERunner, experts: Any) -> str | None:
    config = runner.moe_config
    if config.activation != MoEActivation.SILU or experts.apply_router_weight_on_input:
        return "its experts are no plain SwiGLU"
    if config.experts_per_token > ops.MAX_TOPK:
        return f"a token has {config.experts_per_token} experts"
    if _width(runner) % ops.GROUP:
        return f"its width {_width(runner)} is no 32s"
    return None


def _width(runner: MoERunner) -> int:
    """Intermediate dimensions of the experts of this rank."""
    width = runner.moe_config.intermediate_size_per_partition_unpadded
    assert width is not None  # FusedMoEConfig sets it where it is not given
    return width


def _fused_shared(
    runner: MoERunner,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    """Weights and scales of the shared expert's two projections where it has the width
    of the routed ones and runs in their launches, else None.
    """
    shared = runner.shared_experts
    if shared is None:
        return None
    mlp: Any = shared._layer
    layers = (mlp.gate_up_proj, mlp.down_proj)
    if layers[1].input_size_per_partition != _width(runner):
        return None
    for layer in layers:
        kernel = getattr(layer.quant_method, "kernel", None)
        if not (isinstance(kernel, HopperMxfp8LinearKernel) and kernel.serves):
            return None
    first, second = ((layer.weight, layer.weight_scale) for layer in layers)
    return first, second


class DecodeMoE:
    """``runner.forward`` by the kernels of ``ops`` in small decode graphs."""

    def __init__(self, runner: MoERunner) -> None:
        self._runner = runner
        self._stock = runner.forward
        experts: Any = runner.routed_experts
        limit = runner.moe_config.swiglu_limit
        shared = _fused_shared(runner)
        # The module of a shared expert that does not run in the launches.
        self._shared_apart: Any = None
        if runner.shared_experts is not None and shared is None:
            self._shared_apart = runner.shared_experts._layer
        self._experts = ops.Experts(
            experts.w13_weight,
            experts.w13_weight_scale,
            experts.w2_weight,
            experts.w2_weight_scale,
            None if shared is None else shared[0],
            None if shared is None else shared[1],
            _width(runner),
            math.inf if limit is None else float(limit),
            experts.expert_map,
        )

    why_not = staticmethod(_why_not)

    def bind(self) -> None:
        """Serve the layer from now on."""
        vars(self._runner)["forward"] = self

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``hidden_states`` [M, hidden] bf16 as [M, hidden] bf16, reduced over the TP
        group as upstream would; the router runs here, as in upstream's runner.
        """
        if (
            shared_experts_input is not None
            or not ops.experts_are_faster(
                hidden_states.shape[0], self._experts.intermediate
            )
            or not is_row_major(hidden_states)
            or not in_small_decode_graph(hidden_states)
        ):
            return self._stock(
                hidden_states, router_logits, input_ids, shared_experts_input
            )
        topk_weights, topk_ids = self.route(hidden_states, input_ids)
        act = self._experts.gate_up(hidden_states, topk_ids)
        runner = self._runner
        out = self._experts.down(
            act, topk_ids, topk_weights, runner.routed_scaling_factor
        )
        if self._shared_apart is not None:
            out += self._shared_apart(hidden_states)
        return runner._maybe_reduce_final_output(out, None, False)

    def route(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [M, topk] float32 and experts [M, topk] int32 of each row, negative
        for padding.
        """
        gate: Any = self._runner.gate
        logits = ops.grouped_linear_bf16(
            hidden_states.unsqueeze(1), gate.weight.unsqueeze(0), torch.float32
        ).squeeze(1)
        return self._runner.router.select_experts(
            hidden_states=hidden_states,
            router_logits=logits,
            topk_indices_dtype=torch.int32,
            input_ids=input_ids,
        )
