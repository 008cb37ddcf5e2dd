# SPDX-License-Identifier: Apache-2.0
"""Which calls of a layer are a decode step's, and small enough for these kernels."""

import torch
from vllm.forward_context import in_piecewise_cudagraph

from .ops import MAX_ROWS


def in_small_decode_graph(x: torch.Tensor) -> bool:
    """Whether ``x`` [M, K] is captured into a FULL CUDA graph, with rows that the
    kernels serve. Prefills, eager and PIECEWISE steps keep upstream's kernels: so a
    step's outputs depend on its graph, as all TP ranks choose it, and on nothing else.
    """
    return (
        0 < x.shape[0] <= MAX_ROWS
        and torch.cuda.is_current_stream_capturing()
        and not in_piecewise_cudagraph()
    )


def is_row_major(x: torch.Tensor) -> bool:
    """Whether ``x`` [M, K] bf16 can be copied in pieces of 16 bytes."""
    return (
        x.ndim == 2
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )
