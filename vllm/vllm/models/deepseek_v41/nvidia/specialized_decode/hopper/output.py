# SPDX-License-Identifier: Apache-2.0
"""The output projection of decode steps: inverse RoPE, ``wo_a``, ``wo_b``.

``wo_a`` is held in bf16 (upstream dequantises it when it is loaded), [G * N, K] for G
groups of heads; at one rank's share of eight it is the whole of one group.
"""

from typing import Any

import torch
from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import (
    fused_inv_rope_fp8_quant,
)
from vllm.models.deepseek_v41.attention import DeepseekV4Attention

from . import ops
from .step import in_small_decode_graph

# Above these cuBLAS was faster on an H200.
MAX_ROWS = 32
MAX_GROUPS = 2


class OutputProjection:
    """``attn._o_proj`` with ``wo_a`` by ``ops.grouped_linear_bf16`` in small decode
    graphs.
    """

    def __init__(self, attn: DeepseekV4Attention) -> None:
        self._attn = attn
        self._stock = attn._o_proj

    @staticmethod
    def why_not(attn: DeepseekV4Attention) -> str | None:
        """Why a layer keeps upstream's ``wo_a``, or None if it does not."""
        weight: Any = attn.wo_a.weight
        if weight.dtype != torch.bfloat16:
            return f"wo_a is {weight.dtype}"
        if attn.n_local_groups > MAX_GROUPS:
            return f"wo_a has {attn.n_local_groups} groups, where cuBLAS is faster"
        if attn.o_lora_rank % 16 or weight.shape[-1] % 32:
            return f"wo_a is {tuple(weight.shape)}"
        return None

    def bind(self) -> None:
        """Serve the layer's output projection from now on."""
        vars(self._attn)["_o_proj"] = self

    def __call__(self, attn_out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``attn_out`` [M, padded heads, D] bf16 and ``positions`` [M] as [M, hidden]
        bf16.
        """
        rows = attn_out.shape[0]
        if rows > MAX_ROWS or not in_small_decode_graph(attn_out):
            return self._stock(attn_out, positions)
        attn = self._attn
        groups = attn.n_local_groups
        rotated, _ = fused_inv_rope_fp8_quant(
            attn_out[:, : attn.n_local_heads],
            positions,
            attn.rotary_emb.cos_sin_cache,
            n_groups=groups,
            heads_per_group=attn.n_local_heads // groups,
            nope_dim=attn.nope_head_dim,
            rope_dim=attn.rope_head_dim,
            quantize=False,
        )
        held: Any = attn.wo_a.weight
        weight = held.view(groups, attn.o_lora_rank, -1)
        return attn._wo_b_proj(ops.grouped_linear_bf16(rotated, weight).flatten(1))
