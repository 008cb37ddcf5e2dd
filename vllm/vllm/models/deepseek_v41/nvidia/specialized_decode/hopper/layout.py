# SPDX-License-Identifier: Apache-2.0
"""Marlin's weight layout in plain torch: the reference of what ``kernels.cu`` reads."""

import torch

_PLACE_OF_BLOCK = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])


def weight_codes(packed: torch.Tensor, bits: int, size_n: int) -> torch.Tensor:
    """The codes [..., N, K] uint8 of ``packed`` [..., K / 16, N * bits / 2] int32, e4m3
    where ``bits`` is 8 and e2m1 where it is 4.
    """
    *lead, k_tiles, _ = packed.shape
    n_tiles, device = size_n // 64, packed.device
    lane = torch.arange(32, device=device)
    row, column = lane // 4, 2 * (lane % 4)
    out = torch.empty(*lead, n_tiles, 64, k_tiles, 16, dtype=torch.uint8, device=device)
    if bits == 8:
        words = packed.view(torch.uint8).view(*lead, k_tiles, n_tiles, 32, 4, 2, 4)
        for block in range(4):
            for half in range(2):
                for place, k in enumerate((0, 8, 1, 9)):
                    codes = words[..., block, half, place]
                    out[..., 16 * block + 8 * half + row, :, column + k] = (
                        codes.movedim(-1, 0).movedim(-2, -1)
                    )
    else:
        words = packed.view(*lead, k_tiles, n_tiles, 32, 4)
        for block in range(4):
            # By nibble: (n of 16, k) relative to the lane's.
            for nibble, (n, k) in enumerate(
                ((0, 0), (0, 8), (8, 0), (8, 8), (0, 1), (0, 9), (8, 1), (8, 9))
            ):
                codes = (words[..., block] >> (4 * nibble)) & 15
                out[..., 16 * block + n + row, :, column + k] = (
                    codes.to(torch.uint8).movedim(-1, 0).movedim(-2, -1)
                )
    return out.reshape(*lead, size_n, 16 * k_tiles)


def scale_codes(packed: torch.Tensor) -> torch.Tensor:
    """The ue8m0 codes [..., N, K / 32] of ``packed`` [..., K / 32, N] uint8."""
    *lead, groups, size_n = packed.shape
    octets = packed.view(*lead, groups, size_n // 64, 8, 8)
    by_n = octets[..., _PLACE_OF_BLOCK.to(packed.device)].movedim(-1, -2)
    return by_n.reshape(*lead, groups, size_n).movedim(-1, -2)


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dequantized(
    packed: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [..., N, K] of ``dtype`` that ``packed`` and ``scales`` stand for."""
    codes = weight_codes(packed, bits, scales.shape[-1])
    if bits == 8:
        values = codes.view(torch.float8_e4m3fn).to(dtype)
    else:
        values = _E2M1.to(codes.device, dtype)[codes.long()]
    exponents = scale_codes(scales.view(torch.uint8)).to(torch.int32) - 127
    return torch.ldexp(values, exponents.repeat_interleave(32, -1))
