# SPDX-License-Identifier: Apache-2.0
"""The products of a Hopper decode step, over weights as vLLM's loader leaves them.

M is rows of a step, at most ``MAX_ROWS``. Weights of MXFP8 and MXFP4 layers are in
Marlin's layout, described in ``kernels.cu``.
"""

import ctypes
from dataclasses import dataclass

import torch

from .kernels import kernels

MAX_ROWS = 64
TILE_ROWS = 64
GROUP = 32
MAX_TOPK = 8

# The largest ue8m0 codes whose scale joins its weight in bf16: above them a weight
# could be 2^16 (MXFP8) or 12 (MXFP4).
MAX_MXFP8_SCALE = 134
MAX_MXFP4_SCALE = 128

_THREADS = 256
_WARPS = _THREADS // 32
_SUM_THREADS = 64
_SMS = 132
_ROWS_BYTES = 8 * GROUP * 2
_MXFP8_GROUP = 2 * 1024 + TILE_ROWS
_MXFP4_GROUP = 2 * 512 + TILE_ROWS
# What a block remembers of each pair.
_PAIR_BYTES = 28
_DOWN_GROUPS = 3
_MORE_THAN_HALF_AN_SM = 118 * 1024


def columns_of(rows: int) -> int:
    """How many times 8 rows a block of a linear layer serves."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def linear_split(rows: int, n: int, k: int) -> int:
    """Over how many blocks of a cluster K is split: so many that the grid still runs at
    once, and each warp keeps two scale groups.
    """
    columns = columns_of(rows)
    blocks = n // TILE_ROWS * -(-rows // (8 * columns))
    split = 1
    while (
        split < 8
        and 2 * split * blocks <= _SMS * (2 if columns == 1 else 1)
        and k // GROUP >= 2 * _WARPS * 2 * split
    ):
        split *= 2
    return split


def linear_is_faster(rows: int, n: int, k: int) -> bool:
    """Whether ``linear_mxfp8`` was faster than Marlin on an H200, by the shapes of
    ranks of 1, 2, 4 and 8: the more rows, the narrower a layer must be.
    """
    if rows <= 8:
        return k <= 8192
    if rows <= 16:
        return n * k <= 12_000_000 or k <= 1280
    if rows <= 32:
        return n * k <= 12_000_000 and n <= 5120
    return n * k <= 9_500_000 and n <= 4096


def experts_are_faster(rows: int, intermediate: int) -> bool:
    """Whether ``Experts`` was faster than Marlin on an H200: not with many rows for
    whole experts, as expert parallelism has them.
    """
    return rows <= (16 if intermediate > 1152 else MAX_ROWS)


class _LinearArgs(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("n", ctypes.c_int),
        ("n_out", ctypes.c_int),
        ("k", ctypes.c_int),
        ("x_stride", ctypes.c_int),
        ("out_stride", ctypes.c_int),
    ]


def linear_mxfp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    size_n: int,
    split: int | None = None,
) -> torch.Tensor:
    """``x`` [M, K] bf16 times an MXFP8 weight [N, K], as [M, N] bf16.

    ``weight`` [K / 16, 4 N] int32 and ``scales`` [K / 32, N] ue8m0 in Marlin's layout,
    which may be padded in both; ``size_n`` is N without the padding, even.
    """
    rows, k = x.shape
    n = scales.shape[1]
    out = x.new_empty(rows, size_n)
    columns = columns_of(rows)
    tiles = n // TILE_ROWS
    cluster = split or linear_split(rows, n, k)
    clusters = min(tiles, _SMS * (1 if columns == 4 else 2) // cluster)
    stages = 3 if columns == 2 else 4
    shared = _WARPS * stages * (_MXFP8_GROUP + columns * _ROWS_BYTES)
    # The sums of the cluster, and the warps' parts of some of them.
    shared += 4 * 8 * columns * (2 * TILE_ROWS + _WARPS * (64 if columns == 1 else 32))
    kernels().launch(
        f"linear_mxfp8_{columns}",
        (cluster * clusters, -(-rows // (8 * columns)), 1),
        cluster,
        _THREADS,
        shared,
        _LinearArgs(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            scales.data_ptr(),
            rows,
            n,
            size_n,
            k,
            x.stride(0),
            out.stride(0),
        ),
    )
    return out


class _GroupedLinearArgs(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("x_stride", ctypes.c_int),
        ("x_group_stride", ctypes.c_int),
        ("out_stride", ctypes.c_int),
        ("out_group_stride", ctypes.c_int),
        ("out_is_float", ctypes.c_int),
    ]


def grouped_linear_bf16(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    split: int | None = None,
) -> torch.Tensor:
    """``x`` [M, G, K] bf16 times ``weight`` [G, N, K] bf16, group by group, as
    [M, G, N] of ``out_dtype``, bf16 or float32; N in whole 16s, K in whole 32s.
    """
    rows, groups, k = x.shape
    n = weight.shape[1]
    out = x.new_empty(rows, groups, n, dtype=out_dtype)
    columns = columns_of(rows)
    tiles = n // 16
    if split is None:
        split = 1
        while split < 4 and tiles * groups * split < 96:
            split *= 2
    kernels().launch(
        f"linear_bf16_{columns}",
        (split * tiles, -(-rows // (8 * columns)), groups),
        split,
        _THREADS,
        0,
        _GroupedLinearArgs(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            rows,
            n,
            k,
            x.stride(0),
            x.stride(1),
            out.stride(0),
            out.stride(1),
            out_dtype == torch.float32,
        ),
    )
    return out


class _ExpertMatrices(ctypes.Structure):
    _fields_ = [
        ("routed_weights", ctypes.c_void_p),
        ("routed_scales", ctypes.c_void_p),
        ("shared_weights", ctypes.c_void_p),
        ("shared_scales", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("shared_n", ctypes.c_int),
        ("shared_k", ctypes.c_int),
    ]


class _Routing(ctypes.Structure):
    _fields_ = [
        ("expert_of", ctypes.c_void_p),
        ("local_expert", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int),
        ("topk", ctypes.c_int),
        ("rows", ctypes.c_int),
    ]


class _GateUpArgs(ctypes.Structure):
    _fields_ = [
        ("w13", _ExpertMatrices),
        ("routing", _Routing),
        ("act", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("intermediate", ctypes.c_int),
        ("x_stride", ctypes.c_int),
        ("limit", ctypes.c_float),
    ]


class _DownArgs(ctypes.Structure):
    _fields_ = [
        ("w2", _ExpertMatrices),
        ("routing", _Routing),
        ("parts", ctypes.c_void_p),
        ("act", ctypes.c_void_p),
        ("intermediate", ctypes.c_int),
        ("chunks", ctypes.c_int),
    ]


class _SumArgs(ctypes.Structure):
    _fields_ = [
        ("routing", _Routing),
        ("out", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("pair_weights", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("chunks", ctypes.c_int),
        ("has_shared", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer, in Marlin's layout, I padded to I_padded.

    Routed: ``w13`` [experts, K / 16, 4 I_padded] int32 with ``w13_scales`` [experts,
    K / 32, 2 I_padded], gate first; ``w2`` [experts, I_padded / 16, 2 K] int32 with
    ``w2_scales`` [experts, I_padded / 32, K]. Shared: (weight, scales) of its MXFP8
    gate_up [2 I, K] and down [K, I] projections, None where there is none; I in whole
    32s. ``local_expert`` [global experts] int32 says where an expert lies here, -1
    where nowhere; None where all are here. ``limit`` clamps SwiGLU, infinity where
    nothing does.
    """

    w13: torch.Tensor
    w13_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    shared_w13: tuple[torch.Tensor, torch.Tensor] | None
    shared_w2: tuple[torch.Tensor, torch.Tensor] | None
    intermediate: int
    limit: float
    local_expert: torch.Tensor | None = None

    def _expected_visits(self, rows: int, topk: int) -> float:
        """How many visits of an expert a step of ``rows`` rows takes at most, where the
        rows choose evenly among all ranks' experts.
        """
        local = self.w13.shape[0]
        experts = local if self.local_expert is None else self.local_expert.shape[0]
        return rows * topk * local / experts + (-(-rows // 8) if self.shared_w13 else 0)

    def _routing(self, topk_ids: torch.Tensor) -> _Routing:
        rows, topk = topk_ids.shape
        return _Routing(
            topk_ids.data_ptr(),
            None if self.local_expert is None else self.local_expert.data_ptr(),
            rows * topk,
            topk,
            rows,
        )

    def gate_up(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        split: int | None = None,
    ) -> torch.Tensor:
        """SwiGLU of the gate and up projections of ``x`` [M, K] bf16, for each choice
        of ``topk_ids`` [M, topk] int32 (negative: none) and, after those, for each row
        by the shared expert: [M * topk + M, I] bf16.
        """
        rows = x.shape[0]
        routing = self._routing(topk_ids)
        shared = self.shared_w13
        act = x.new_empty(routing.num_pairs + rows, self.intermediate)
        tiles = -(-self.intermediate // TILE_ROWS)
        items = tiles * self._expected_visits(rows, routing.topk)
        if split is None:
            split = 4 if items <= 48 else 2 if items <= 160 else 1
        # Of few blocks two come to one SM where they can, while others have none.
        one_an_sm = items * split <= _SMS
        kernels().launch(
            "experts_gate_up",
            ((1 if one_an_sm else 2) * _SMS // split * split, 1, 1),
            split,
            _THREADS,
            max(
                _WARPS * 2 * (2 * _MXFP8_GROUP + TILE_ROWS + _ROWS_BYTES)
                + 4 * 2 * TILE_ROWS * 8 * (2 + _WARPS // 2)
                + _PAIR_BYTES * routing.num_pairs,
                _MORE_THAN_HALF_AN_SM if one_an_sm else 0,
            ),
            _GateUpArgs(
                _matrices(self.w13, self.w13_scales, shared),
                routing,
                act.data_ptr(),
                x.data_ptr(),
                self.intermediate,
                x.stride(0),
                self.limit,
            ),
        )
        return act

    def down(
        self,
        act: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        scale: float,
        chunks: int | None = None,
    ) -> torch.Tensor:
        """``scale`` times the sum of the down projections of ``act`` by
        ``topk_weights`` [M, topk] float32, plus the shared expert's, as [M, K] bf16.
        To be launched right after ``gate_up``.
        """
        routing = self._routing(topk_ids)
        rows, pairs, k = routing.rows, routing.num_pairs, self.w2_scales.shape[2]
        groups = self.intermediate // GROUP
        if chunks is None:
            units = k // TILE_ROWS * self._expected_visits(rows, routing.topk)
            most = groups // (3 if groups <= 9 else 9)
            chunks = min(max(-(-groups // 18), round(1700 / units)), max(1, most))
        parts = act.new_empty(chunks, pairs + rows, k, dtype=torch.float32)
        kernels().launch(
            "experts_down",
            (2 * _SMS, 1, 1),
            1,
            _THREADS,
            _WARPS * 2 * _DOWN_GROUPS * (_MXFP4_GROUP + _ROWS_BYTES)
            + _PAIR_BYTES * pairs,
            _DownArgs(
                _matrices(self.w2, self.w2_scales, self.shared_w2),
                routing,
                parts.data_ptr(),
                act.data_ptr(),
                self.intermediate,
                chunks,
            ),
        )
        out = act.new_empty(rows, k)
        kernels().launch(
            "experts_sum",
            (-(-k // (4 * _SUM_THREADS)), rows, 1),
            1,
            _SUM_THREADS,
            0,
            _SumArgs(
                routing,
                out.data_ptr(),
                parts.data_ptr(),
                topk_weights.data_ptr(),
                k,
                chunks,
                self.shared_w2 is not None,
                scale,
            ),
        )
        return out


def _matrices(
    weights: torch.Tensor,
    scales: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> _ExpertMatrices:
    _, groups, n = scales.shape
    shared_groups, shared_n = shared[1].shape if shared else (0, 0)
    return _ExpertMatrices(
        weights.data_ptr(),
        scales.data_ptr(),
        shared[0].data_ptr() if shared else None,
        shared[1].data_ptr() if shared else None,
        n,
        GROUP * groups,
        shared_n,
        GROUP * shared_groups,
    )
