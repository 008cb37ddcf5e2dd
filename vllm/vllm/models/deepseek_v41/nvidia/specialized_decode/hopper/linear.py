# SPDX-License-Identifier: Apache-2.0
"""MXFP8 linear layers of decode steps.

Upstream's selection of linear kernels meets ``HopperMxfp8LinearKernel`` first where the
Hopper decode is on. It leaves the weights to Marlin, whose layout it reads, and all
steps but small FULL graphs too: one copy of the weights serves both.
"""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import _POSSIBLE_MXFP8_KERNELS
from vllm.model_executor.kernels.linear.mxfp8.marlin import MarlinMxfp8LinearKernel
from vllm.platforms import PlatformEnum

from . import ops
from .step import in_small_decode_graph, is_row_major

logger = init_logger(__name__)


def why_not_linear(
    scales: torch.Tensor, size_n: int, size_k: int, has_bias: bool
) -> str | None:
    """Why the kernel does not serve a layer, or None if it does. ``scales`` [K / 32, N]
    are in Marlin's layout. Waits for the device.
    """
    if has_bias:
        return "it has a bias"
    if size_n % 2 or size_k % ops.GROUP:
        return f"its shape [{size_n}, {size_k}] is odd in N or no 32s in K"
    if int(scales.view(torch.uint8).max()) > ops.MAX_MXFP8_SCALE:
        return f"a scale is above 2^{ops.MAX_MXFP8_SCALE - 127}"
    return None


class HopperMxfp8LinearKernel(MarlinMxfp8LinearKernel):
    """``ops.linear_mxfp8`` in small decode graphs, Marlin elsewhere."""

    serves = False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weights as Marlin does, and see whether the kernel serves them."""
        super().process_weights_after_loading(layer)
        made: Any = layer
        why = why_not_linear(
            made.weight_scale,
            made.output_size_per_partition,
            made.input_size_per_partition,
            getattr(layer, "bias", None) is not None,
        )
        self.serves = why is None
        if why is not None:
            logger.warning(
                "DeepSeek-V4.1 decode: %s stays with Marlin, as %s.",
                getattr(layer, "prefix", "a linear layer"),
                why,
            )

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x`` [M, K] bf16 times the layer's weight, plus ``bias``: [M, N] bf16."""
        made: Any = layer
        if (
            self.serves
            and bias is None
            and is_row_major(x)
            and in_small_decode_graph(x)
            and ops.linear_is_faster(x.shape[0], made.weight_scale.shape[1], x.shape[1])
        ):
            return ops.linear_mxfp8(
                x, made.weight, made.weight_scale, made.output_size_per_partition
            )
        return super().apply_weights(layer, x, bias)


def prefer_hopper_kernel() -> None:
    """Let the layers made from now on in this process take the kernel."""
    kernels = _POSSIBLE_MXFP8_KERNELS[PlatformEnum.CUDA]
    if HopperMxfp8LinearKernel not in kernels:
        kernels.insert(0, HopperMxfp8LinearKernel)
