# SPDX-License-Identifier: Apache-2.0
"""What the kernels of ``ops`` compute, in plain torch and any precision.

Every function takes weights that ``layout.dequantized`` has made, so that with float64
nothing is left of rounding but that of the weights' own formats.
"""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [M, K] times ``weight`` [N, K], as [M, N] of the weight's dtype."""
    return x.to(weight.dtype) @ weight.T


def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [M, G, K] times ``weight`` [G, N, K], as [M, G, N]."""
    return torch.einsum("mgk,gnk->mgn", x.to(weight.dtype), weight)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``, as upstream's
    ``SiluAndMulWithClamp``.
    """
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate) * up.clamp(-limit, limit)


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: dict[int, torch.Tensor],
    w2: dict[int, torch.Tensor],
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    limit: float,
    scale: float,
) -> torch.Tensor:
    """The experts' sum for ``x`` [M, K], as [M, K].

    ``w13`` and ``w2`` hold the weights [2 I, K] and [K, I] of the experts that are
    here, by their global number; choices of others, and negative ones, add nothing.
    ``shared`` are the shared expert's.
    """
    dtype = next(iter([*w13.values(), *(shared or ())])).dtype
    x, topk_weights = x.to(dtype), topk_weights.to(dtype)
    out = torch.zeros_like(x)
    for expert, first in w13.items():
        rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (x[rows] @ first.T).chunk(2, dim=-1)
        part = swiglu(gate, up, limit) @ w2[expert].T
        out.index_add_(0, rows, scale * topk_weights[rows, choices, None] * part)
    if shared is not None:
        gate, up = (x @ shared[0].T).chunk(2, dim=-1)
        out += swiglu(gate, up, limit) @ shared[1].T
    return out
