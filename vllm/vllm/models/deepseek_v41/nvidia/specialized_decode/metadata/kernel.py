# SPDX-License-Identifier: Apache-2.0
"""The attention metadata of a decode step in one launch.

A ``Job`` names one set of buffers to write and the device data it follows from;
the launch runs one program per job and token, a wide block table being cut into
several jobs. Every program finds its token's request in the device
``query_start_loc``, so one launch serves any number of requests up to the padded
one, of even or uneven query lengths. No program reads what another one writes.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv, next_power_of_2

# Columns of a block table's row that a program writes at once: 8 in each thread, whose
# loads are under way together. With 16 the kernel takes 72 registers for 40, and an SM
# holds fewer programs of every job. Neighbouring threads have neighbouring columns, so
# a warp stores a whole line; 16 bytes a thread would need rows that begin at multiples
# of 16 bytes, and a row has any number of columns.
TILE_COLUMNS = 1024
# Rows are cut until a job has so many programs, or a tile each: about what an H200 runs
# at one time, 12 on each of 132 SMs. More would only wait for these to end, so from
# there on a program takes several tiles.
_PROGRAMS = 1536


class Kind(IntEnum):
    """What a job writes for a token (TABLE: for a request).

    For padding tokens slots are -1, lengths and states 0, and the rest is named.
    """

    REQUEST = 0
    """outs[0] [tokens] int32: its request; the last one for padding."""
    WINDOW = 1
    """outs[0] [tokens] bool: whether it has a slot; outs[1] [tokens] int32: the
    length of its window; outs[2] [tokens, window] int32: the window's slots."""
    COMPRESSED_SLOT = 2
    """outs[0] [tokens] int64: the slot of the compressed state it completes."""
    RING_SLOT = 3
    """outs[0] [tokens] int64: its slot in the request's ring of block_size, -1 if
    the ring is the null block."""
    CONTEXT = 4
    """outs[0] [tokens] int32: compressed states up to it; outs[1] [requests]
    int32: query length; outs[2] [tokens] int32: 1; outs[3] [tokens] int32: its
    request, or a number of its own past the requests; each only if given."""
    TABLE = 5
    """outs[0] [requests, out_columns] int32: the request's kernel blocks; past them
    whatever ``table`` holds, as upstream copies it too."""
    TOKEN_TABLE = 6
    """outs[0] [tokens, out_columns] int32: its request's kernel blocks; those of the
    null block for padding."""
    SCHEDULE = 7
    """outs[0] [workers + 1, 2] int32: where each worker begins, as an item and a unit
    of it. An item is ``item_tokens`` tokens; the states up to its last one are so
    many units of ``block_size``. The units of all items in order go to the workers
    in order, to each as many, or one more to the last ones. The end, and all where
    there is no unit, is past the last item."""


class Job(NamedTuple):
    """A row of the table of jobs. Tensors are given by their addresses.

    ``table`` [requests, blocks] int32 holds blocks of the KV-cache manager, of
    which kernels may see ``split`` each: kernel block j of block b is number
    b * ``scale`` + j, or the null block where that is negative and ``clamp`` set.
    A kernel block holds ``block_size`` states of ``ratio`` tokens each.
    """

    kind: Kind
    outs: tuple[int, int, int, int]
    out_stride: int = 0
    out_columns: int = 0
    slots: int = 0
    """[tokens] int64, negative for padding and for a token not to be cached."""
    table: int = 0
    table_stride: int = 0
    split: int = 1
    scale: int = 1
    clamp: bool = False
    block_size: int = 1
    ratio: int = 1
    window: int = 0
    workers: int = 0
    item_tokens: int = 1
    first_column: int = 0
    """Of a table, the first of the columns to write; those before it are another's."""

    def row(self) -> list[int]:
        """It as the kernel reads it."""
        kind, outs, *rest = self
        return [int(value) for value in (kind, *outs, *rest)]


_REQUEST = tl.constexpr(int(Kind.REQUEST))
_WINDOW = tl.constexpr(int(Kind.WINDOW))
_COMPRESSED_SLOT = tl.constexpr(int(Kind.COMPRESSED_SLOT))
_RING_SLOT = tl.constexpr(int(Kind.RING_SLOT))
_CONTEXT = tl.constexpr(int(Kind.CONTEXT))
_TABLE = tl.constexpr(int(Kind.TABLE))
_SCHEDULE = tl.constexpr(int(Kind.SCHEDULE))


def _column(field: str) -> tl.constexpr:
    """The column of ``Job.row()`` at which ``field`` begins; ``outs`` takes four."""
    index = Job._fields.index(field)
    return tl.constexpr(index if index < 2 else index + 3)


_OUTS = _column("outs")
_OUT_STRIDE = _column("out_stride")
_OUT_COLUMNS = _column("out_columns")
_SLOTS = _column("slots")
_BLOCK_TABLE = _column("table")
_TABLE_STRIDE = _column("table_stride")
_SPLIT = _column("split")
_SCALE = _column("scale")
_CLAMP = _column("clamp")
_BLOCK_SIZE = _column("block_size")
_RATIO = _column("ratio")
_WINDOW_SIZE = _column("window")
_WORKERS = _column("workers")
_ITEM_TOKENS = _column("item_tokens")
_FIRST_COLUMN = _column("first_column")
_COLUMNS = tl.constexpr(len(Job._fields) + 3)


@triton.jit
def _kernel_blocks(job, req, index, mask):
    """The request's kernel blocks at ``index`` of its table, int64."""
    table = tl.load(job + _BLOCK_TABLE).to(tl.pointer_type(tl.int32))
    split = tl.load(job + _SPLIT)
    row = table + req.to(tl.int64) * tl.load(job + _TABLE_STRIDE)
    block = tl.load(row + index // split, mask=mask, other=0).to(tl.int64)
    block = block * tl.load(job + _SCALE) + index % split
    return tl.where((block < 0) & (tl.load(job + _CLAMP) != 0), 0, block)


@triton.jit
def _write_window(job, token, req, position, replay_start, MAX_WINDOW: tl.constexpr):
    has_slot = tl.load(tl.load(job + _SLOTS).to(tl.pointer_type(tl.int64)) + token) >= 0
    window = tl.load(job + _WINDOW_SIZE)
    block_size = tl.load(job + _BLOCK_SIZE)
    # A replayed prefix holds no window state below the replay's start.
    start = tl.maximum(position - window + 1, tl.load(replay_start + req))
    start = tl.maximum(start, 0)
    length = tl.where(has_slot, position + 1 - start, 0)
    offset = tl.arange(0, MAX_WINDOW)
    inside = offset < length
    at = start + offset
    block = _kernel_blocks(job, req, at // block_size, inside)
    slot = tl.where(inside, block * block_size + at % block_size, -1)
    tl.store(
        tl.load(job + _OUTS).to(tl.pointer_type(tl.int8)) + token, has_slot.to(tl.int8)
    )
    tl.store(
        tl.load(job + _OUTS + 1).to(tl.pointer_type(tl.int32)) + token,
        length.to(tl.int32),
    )
    row = tl.load(job + _OUTS + 2).to(tl.pointer_type(tl.int32)) + token * tl.load(
        job + _OUT_STRIDE
    )
    tl.store(row + offset, slot.to(tl.int32), mask=offset < window)


@triton.jit
def _write_compressed_slot(job, token, req, position, real):
    has_slot = tl.load(tl.load(job + _SLOTS).to(tl.pointer_type(tl.int64)) + token) >= 0
    ratio = tl.load(job + _RATIO)
    block_size = tl.load(job + _BLOCK_SIZE)
    # The last of a state's tokens writes it.
    writes = real & has_slot & ((position + 1) % ratio == 0)
    state = tl.where(writes, position // ratio, 0)
    block = _kernel_blocks(job, req, state // block_size, writes)
    slot = tl.where(writes, block * block_size + state % block_size, -1)
    tl.store(tl.load(job + _OUTS).to(tl.pointer_type(tl.int64)) + token, slot)


@triton.jit
def _write_ring_slot(job, token, req, positions, real):
    capacity = tl.load(job + _BLOCK_SIZE)
    block = _kernel_blocks(job, req, 0, real)
    slot = block * capacity + tl.load(positions + token, mask=real, other=0) % capacity
    # The null block stands for no ring at all.
    slot = tl.where(real & (block != 0), slot, -1)
    tl.store(tl.load(job + _OUTS).to(tl.pointer_type(tl.int64)) + token, slot)


@triton.jit
def _write_context(
    job, token, req, position, real, query_start_loc, num_reqs, num_real
):
    states = tl.where(real, (position + 1) // tl.load(job + _RATIO), 0)
    if tl.load(job + _OUTS) != 0:
        tl.store(
            tl.load(job + _OUTS).to(tl.pointer_type(tl.int32)) + token,
            states.to(tl.int32),
        )
    if (tl.load(job + _OUTS + 1) != 0) & (token < num_reqs):
        query_len = tl.load(query_start_loc + token + 1)
        query_len -= tl.load(query_start_loc + token)
        tl.store(
            tl.load(job + _OUTS + 1).to(tl.pointer_type(tl.int32)) + token, query_len
        )
    if tl.load(job + _OUTS + 2) != 0:
        tl.store(tl.load(job + _OUTS + 2).to(tl.pointer_type(tl.int32)) + token, 1)
    if tl.load(job + _OUTS + 3) != 0:
        row = tl.where(real, req, num_reqs + token - num_real)
        tl.store(tl.load(job + _OUTS + 3).to(tl.pointer_type(tl.int32)) + token, row)


@triton.jit
def _write_table_row(job, row, req, real, part, parts, TILE_COLUMNS: tl.constexpr):
    """Every ``parts``-th tile of the row, from number ``part`` on."""
    first = tl.load(job + _FIRST_COLUMN).to(tl.int32) + part * TILE_COLUMNS
    end = tl.load(job + _OUT_COLUMNS).to(tl.int32)
    split = tl.load(job + _SPLIT).to(tl.uint32)
    scale = tl.load(job + _SCALE).to(tl.int32)
    lowest = tl.where(tl.load(job + _CLAMP) != 0, 0, -(2**31))
    table = tl.load(job + _BLOCK_TABLE).to(tl.pointer_type(tl.int32))
    table += req.to(tl.int64) * tl.load(job + _TABLE_STRIDE)
    out = tl.load(job + _OUTS).to(tl.pointer_type(tl.int32))
    out += row.to(tl.int64) * tl.load(job + _OUT_STRIDE)
    # A division takes more instructions than all else that a column takes, so multiply:
    # the upper half of 2 * column times 2**31 / split, rounded up, is column // split
    # while column * split < 2**31.
    reciprocal = 0x7FFFFFFF // split + 1
    for begin in range(first, end, parts * TILE_COLUMNS):
        column = begin + tl.arange(0, TILE_COLUMNS)
        inside = column < end
        index = tl.umulhi(2 * column.to(tl.uint32), reciprocal).to(tl.int32)
        block = tl.load(table + index, mask=inside & real, other=0)
        block = block * scale + (column - index * split.to(tl.int32))
        tl.store(out + column, tl.maximum(block, lowest), mask=inside)


@triton.jit
def _write_schedule(
    job,
    token,
    position,
    real,
    query_start_loc,
    seq_lens,
    num_reqs,
    MAX_REQS: tl.constexpr,
    BLOCK_WORKERS: tl.constexpr,
):
    """The program of an item's last token writes the workers that begin in it."""
    item_tokens = tl.load(job + _ITEM_TOKENS).to(tl.int32)
    unit = tl.load(job + _BLOCK_SIZE).to(tl.int32)
    ratio = tl.load(job + _RATIO).to(tl.int32)
    workers = tl.load(job + _WORKERS).to(tl.int32)
    index = tl.arange(0, MAX_REQS)
    inside = index < num_reqs
    starts = tl.load(query_start_loc + index, mask=inside, other=0)
    ends = tl.load(query_start_loc + 1 + index, mask=inside, other=0)
    query_lens = ends - starts
    past = tl.load(seq_lens + index, mask=inside, other=0) - query_lens
    # Units of all items and of those before this one, over requests.
    units = tl.zeros([MAX_REQS], dtype=tl.int32)
    before = tl.zeros([MAX_REQS], dtype=tl.int32)
    for offset in range(0, tl.max(query_lens, 0)):
        at = starts + offset
        closes = (offset < query_lens) & ((at + 1) % item_tokens == 0)
        of_item = tl.cdiv((past + offset + 1) // ratio, unit)
        units += tl.where(closes, of_item, 0)
        before += tl.where(closes & (at < token), of_item, 0)
    total = tl.sum(units, 0)
    first = tl.sum(before, 0)
    own = tl.where(real, tl.cdiv((position.to(tl.int32) + 1) // ratio, unit), 0)
    each = total // workers
    fewer = workers - total % workers
    item = token // item_tokens
    items = tl.num_programs(1) // item_tokens
    out = tl.load(job + _OUTS).to(tl.pointer_type(tl.int32))
    for block in range(0, workers + 1, BLOCK_WORKERS):
        worker = block + tl.arange(0, BLOCK_WORKERS)
        begin = worker * each + tl.maximum(worker - fewer, 0)
        within = begin - first
        here = (worker < workers) & (within >= 0) & (within < own)
        # The last item's program writes what lies in no item.
        past_all = (worker == workers) | ((worker < workers) & (total == 0))
        past_all &= item == items - 1
        row = out + 2 * worker
        tl.store(row, tl.where(here, item, items), mask=here | past_all)
        tl.store(row + 1, tl.where(here, within, 0), mask=here | past_all)


@triton.jit(do_not_specialize=["num_reqs"])
def _decode_metadata_kernel(
    jobs,
    query_start_loc,
    seq_lens,
    positions,
    replay_start,
    num_reqs,
    MAX_REQS: tl.constexpr,
    MAX_WINDOW: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BLOCK_WORKERS: tl.constexpr,
):
    job = jobs + tl.program_id(0) * _COLUMNS
    token = tl.program_id(1)
    kind = tl.load(job)
    if kind == _TABLE:
        # A request's row is shared by as many programs as it has tokens.
        parts = tl.num_programs(1) // num_reqs
        part = token // num_reqs
        if part < parts:
            req = token % num_reqs
            _write_table_row(job, req, req, True, part, parts, TILE_COLUMNS)
        return
    # The requests that end at or before the token come before its own; padding
    # requests end where the real tokens do.
    index = tl.arange(0, MAX_REQS)
    ends = tl.load(query_start_loc + 1 + index, mask=index < num_reqs, other=2**31 - 1)
    req = tl.minimum(tl.sum((ends <= token).to(tl.int32), 0), num_reqs - 1)
    num_real = tl.load(query_start_loc + num_reqs)
    real = token < num_real
    start = tl.load(query_start_loc + req)
    end = tl.load(query_start_loc + req + 1)
    position = (tl.load(seq_lens + req) - (end - start) + token - start).to(tl.int64)

    if kind == _REQUEST:
        tl.store(tl.load(job + _OUTS).to(tl.pointer_type(tl.int32)) + token, req)
    elif kind == _WINDOW:
        _write_window(job, token, req, position, replay_start, MAX_WINDOW)
    elif kind == _COMPRESSED_SLOT:
        _write_compressed_slot(job, token, req, position, real)
    elif kind == _RING_SLOT:
        _write_ring_slot(job, token, req, positions, real)
    elif kind == _CONTEXT:
        _write_context(
            job, token, req, position, real, query_start_loc, num_reqs, num_real
        )
    elif kind == _SCHEDULE:
        if (token + 1) % tl.load(job + _ITEM_TOKENS) == 0:
            _write_schedule(
                job,
                token,
                position,
                real,
                query_start_loc,
                seq_lens,
                num_reqs,
                MAX_REQS,
                BLOCK_WORKERS,
            )
    else:
        _write_table_row(job, token, req, real, 0, 1, TILE_COLUMNS)


def longest_window(jobs: Sequence[Job]) -> int:
    """That of any of ``jobs``, in tokens; 1 where none has one."""
    return max([1, *(job.window for job in jobs)])


def _cut(job: Job, num_reqs: int, num_tokens: int) -> Iterator[Job]:
    """``job``, or the jobs that share its columns where it writes a wide table, each
    program of which writes a tile or, where there are programs enough, several.
    """
    if job.kind not in (Kind.TABLE, Kind.TOKEN_TABLE):
        yield job
        return
    # Programs of one job that share a row, as the kernel has it.
    parts = num_tokens // num_reqs if job.kind == Kind.TABLE else 1
    tiles = cdiv(job.out_columns, parts * TILE_COLUMNS)
    each = cdiv(tiles, cdiv(_PROGRAMS, num_tokens))
    width = each * parts * TILE_COLUMNS
    for first in range(0, job.out_columns, width):
        end = min(first + width, job.out_columns)
        yield job._replace(first_column=first, out_columns=end)


def job_table(
    jobs: Sequence[Job], num_reqs: int, num_tokens: int, device: torch.device
) -> torch.Tensor:
    """The jobs as [jobs or more, columns] int64, for ``write_decode_metadata``.

    ``num_reqs`` and ``num_tokens`` are those of the launch; with others it writes the
    same, by more or fewer programs than it takes.
    """
    rows = [part.row() for job in jobs for part in _cut(job, num_reqs, num_tokens)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def write_decode_metadata(
    jobs: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    replay_start: torch.Tensor,
    num_reqs: int,
    num_tokens: int,
    max_num_reqs: int,
    max_window: int,
) -> None:
    """Run ``jobs`` for ``num_tokens`` tokens of ``num_reqs`` requests, both with
    padding.

    There are at least as many tokens as requests, as each program may serve one.
    ``query_start_loc`` [num_reqs + 1] int32 ends in the number of real tokens,
    ``seq_lens`` [num_reqs] int32 counts each request's tokens after the step,
    ``positions`` [num_tokens] is int64, ``replay_start`` [num_reqs] int32 is the
    first position each request has window state of.

    ``max_num_reqs`` and ``max_window`` bound what any launch is given: they
    choose the compiled kernel, the other numbers do not.
    """
    _decode_metadata_kernel[(jobs.shape[0], num_tokens)](
        jobs,
        query_start_loc,
        seq_lens,
        positions,
        replay_start,
        num_reqs,
        MAX_REQS=next_power_of_2(max_num_reqs),
        MAX_WINDOW=next_power_of_2(max_window),
        TILE_COLUMNS=TILE_COLUMNS,
        BLOCK_WORKERS=256,
        num_warps=4,
    )
