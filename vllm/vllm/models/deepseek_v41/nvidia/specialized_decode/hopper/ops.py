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
_PAIR_BYTES = 32
_DOWN_GROUPS = 3


def columns_of(rows: int) -> int:
    """How many times 8 rows a block of a linear layer serves."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def linear_split(rows: int, n: int, k: int) -> int:
    """Over how many blocks of a cluster K is split: so many that the grid still runs at
    once, and each warp keeps two scale groups."""
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
    ranks of 1, 2, 4 and 8: the more rows, the narrower a layer must be."""
    if rows <= 8:
        return k <= 8192
    if rows <= 16:
        return n * k <= 12_000_000 or k <= 1280
    if rows <= 32:
        return n * k <= 12_000_000 and n <= 5120
    return n * k <= 9_500_000 and n <= 4096


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
        ("positions", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("x_stride", ctypes.c_int),
        ("x_group_stride", ctypes.c_int),
        ("out_stride", ctypes.c_int),
        ("out_group_stride", ctypes.c_int),
        ("out_is_float", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("rope_at", ctypes.c_int),
    ]


@dataclass(frozen=True)
class InverseRope:
    """Turns the last dimensions of each head back by the row's position.

    ``positions`` [M] int64; ``cos_sin`` [positions, R] float32, R / 2 cosines and then
    as many sines; of each ``head_dim`` values the last R are R / 2 pairs of neighbours.
    Whole 32s both, and R / 2 in whole 4s.
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor
    head_dim: int


def grouped_linear_bf16(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    inverse_rope: InverseRope | None = None,
    split: int | None = None,
) -> torch.Tensor:
    """``x`` [M, G, K] bf16 times ``weight`` [G, N, K] bf16, group by group, as
    [M, G, N] of ``out_dtype``, bf16 or float32; N in whole 16s, K in whole 32s.
    ``inverse_rope`` is applied to ``x`` first."""
    rows, groups, k = x.shape
    n = weight.shape[1]
    out = x.new_empty(rows, groups, n, dtype=out_dtype)
    rope = inverse_rope
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
            rope.positions.data_ptr() if rope else None,
            rope.cos_sin.data_ptr() if rope else None,
            rows,
            n,
            k,
            x.stride(0),
            x.stride(1),
            out.stride(0),
            out.stride(1),
            out_dtype == torch.float32,
            rope.head_dim if rope else 0,
            rope.head_dim - rope.cos_sin.shape[1] if rope else 0,
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
        ("pair_weights", ctypes.c_void_p),
        ("local_expert", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int),
        ("topk", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("image_bias", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("is_padding", ctypes.c_void_p),
        ("experts", ctypes.c_int),
        ("tokens_are_long", ctypes.c_int),
        ("image_token", ctypes.c_int),
        ("weight_scale", ctypes.c_float),
    ]


# Rows whose experts the experts' own kernels choose.
MAX_CHOSEN_ROWS = _WARPS


@dataclass(frozen=True)
class Choice:
    """How the experts of a step are chosen: the ``topk`` with the largest
    sqrt(softplus(logit)) + bias, by the weights sqrt(softplus(logit)) over their sum,
    times ``weight_scale``.

    ``logits`` [M, experts] float32, M up to ``MAX_CHOSEN_ROWS`` and at most 512
    experts; ``bias`` [experts] float32; for the five tokens from ``image_token`` on
    ``image_bias`` takes its place, where there is one, by ``tokens`` [M] int32 or
    int64. Rows of ``is_padding`` [M] bool choose nothing: expert -1, weight 0.
    """

    logits: torch.Tensor
    topk: int
    bias: torch.Tensor
    weight_scale: float = 1.0
    image_bias: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    image_token: int = 0
    is_padding: torch.Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """The experts of each row: ``ids`` [M, topk] int32 (negative: none) and ``weights``
    [M, topk] float32. Those of a ``choice`` are written by ``Experts.gate_up``."""

    ids: torch.Tensor
    weights: torch.Tensor
    choice: Choice | None = None

    @classmethod
    def by(cls, choice: Choice) -> "Routing":
        """The routing that ``Experts.gate_up`` makes by ``choice``."""
        shape = (choice.logits.shape[0], choice.topk)
        return cls(
            choice.logits.new_empty(shape, dtype=torch.int32),
            choice.logits.new_empty(shape),
            choice,
        )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
        rows choose evenly among all ranks' experts."""
        local = self.w13.shape[0]
        experts = local if self.local_expert is None else self.local_expert.shape[0]
        return rows * topk * local / experts + (-(-rows // 8) if self.shared_w13 else 0)

    def _routing(self, routing: Routing) -> _Routing:
        rows, topk = routing.ids.shape
        made = _Routing(
            routing.ids.data_ptr(),
            routing.weights.data_ptr(),
            _pointer(self.local_expert),
            rows * topk,
            topk,
            rows,
        )
        choice = routing.choice
        if choice is not None:
            made.logits = choice.logits.data_ptr()
            made.bias = choice.bias.data_ptr()
            made.image_bias = _pointer(choice.image_bias)
            made.tokens = _pointer(choice.tokens)
            made.is_padding = _pointer(choice.is_padding)
            made.experts = choice.logits.shape[1]
            made.tokens_are_long = (
                choice.tokens is not None and choice.tokens.dtype == torch.int64
            )
            made.image_token = choice.image_token
            made.weight_scale = choice.weight_scale
        return made

    def gate_up(
        self,
        x: torch.Tensor,
        routing: Routing,
        split: int | None = None,
        blocks_per_sm: int | None = None,
    ) -> torch.Tensor:
        """SwiGLU of the gate and up projections of ``x`` [M, K] bf16, for each choice
        of ``routing`` and, after those, for each row by the shared expert: [M * topk +
        M, I] bf16."""
        rows = x.shape[0]
        args = self._routing(routing)
        shared = self.shared_w13
        act = x.new_empty(args.num_pairs + rows, self.intermediate)
        tiles = -(-self.intermediate // TILE_ROWS)
        items = tiles * self._expected_visits(rows, args.topk)
        if split is None:
            split = 4 if items <= 48 else 2 if items <= 160 else 1
        if blocks_per_sm is None:
            # Two blocks of few come to one SM while others have none.
            blocks_per_sm = 1 if 48 < items * split <= _SMS else 2
        kernels().launch(
            "experts_gate_up",
            (blocks_per_sm * _SMS // split * split, 1, 1),
            split,
            _THREADS,
            max(
                _WARPS * 2 * (2 * _MXFP8_GROUP + TILE_ROWS + _ROWS_BYTES)
                + 4 * 2 * TILE_ROWS * 8 * (2 + _WARPS // 2)
                + _PAIR_BYTES * args.num_pairs,
                118 * 1024 if blocks_per_sm == 1 else 0,
            ),
            _GateUpArgs(
                _matrices(self.w13, self.w13_scales, shared),
                args,
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
        routing: Routing,
        scale: float,
        chunks: int | None = None,
    ) -> torch.Tensor:
        """``scale`` times the weighted sum of the down projections of ``act``, plus the
        shared expert's, as [M, K] bf16. To be launched right after ``gate_up``."""
        args = self._routing(routing)
        rows, pairs, k = args.rows, args.num_pairs, self.w2_scales.shape[2]
        groups = self.intermediate // GROUP
        if chunks is None:
            units = k // TILE_ROWS * self._expected_visits(rows, args.topk)
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
                args,
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
                args,
                out.data_ptr(),
                parts.data_ptr(),
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
