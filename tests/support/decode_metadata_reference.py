"""What the jobs of the fused decode-metadata launch must write, in plain torch.

It follows what ``Kind`` and ``Job`` promise, on whole tensors and on any device; no
step is taken from the kernel. Tensors are as in ``DecodeInputs``: P requests of T
tokens, both with padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.jobs import (
    DecodeInputs,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.kernel import (
    Job,
    Kind,
)

Outs = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class TensorJob:
    """A ``Job`` that still knows its tensors.

    They are those of the KV-cache group ``group`` of the inputs, and the ``outs``, of
    which bools are bytes.
    """

    kind: Kind
    outs: Outs
    group: int
    split: int = 1
    scale: int = 1
    clamp: bool = False
    block_size: int = 1
    ratio: int = 1
    window: int = 0
    workers: int = 0
    item_tokens: int = 1

    def job(self, inputs: DecodeInputs) -> Job:
        addresses = [0 if out is None else out.data_ptr() for out in self.outs]
        first, second, third, fourth = addresses + [0] * (4 - len(addresses))
        rows = [out for out in self.outs if out is not None and out.dim() == 2]
        table = inputs.block_tables[self.group]
        return Job(
            self.kind,
            (first, second, third, fourth),
            out_stride=rows[0].stride(0) if rows else 0,
            out_columns=rows[0].shape[1] if rows else 0,
            slots=inputs.slot_mappings[self.group].data_ptr(),
            table=table.data_ptr(),
            table_stride=table.stride(0),
            split=self.split,
            scale=self.scale,
            clamp=self.clamp,
            block_size=self.block_size,
            ratio=self.ratio,
            window=self.window,
            workers=self.workers,
            item_tokens=self.item_tokens,
        )


@dataclass(frozen=True)
class _Tokens:
    """What is known of each token.

    [T] int64: its request, the last one for padding, and its position; and [T] bool:
    whether it is real and whether it is to be cached.
    """

    request: torch.Tensor
    position: torch.Tensor
    real: torch.Tensor
    cached: torch.Tensor

    @classmethod
    def of(cls, job: TensorJob, inputs: DecodeInputs) -> "_Tokens":
        starts = inputs.query_start_loc.long()
        requests = torch.arange(inputs.num_reqs, device=starts.device)
        tokens = torch.arange(inputs.num_tokens, device=starts.device)
        real = tokens < starts[-1]
        request = torch.full_like(tokens, inputs.num_reqs - 1)
        request[real] = requests.repeat_interleave(starts.diff())
        # The step's tokens are the last ones of their request.
        to_end = starts[1:][request] - tokens
        position = torch.where(real, inputs.seq_lens[request] - to_end, 0)
        return cls(request, position, real, inputs.slot_mappings[job.group] >= 0)


def _kernel_table(job: TensorJob, inputs: DecodeInputs) -> torch.Tensor:
    """[P, blocks * split] int64."""
    table = inputs.block_tables[job.group].long()
    within = torch.arange(job.split, device=table.device)
    blocks = (table[:, :, None] * job.scale + within).flatten(1)
    return blocks.clamp(min=0) if job.clamp else blocks


def _slots(
    job: TensorJob, inputs: DecodeInputs, request: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Where the KV cache holds the states of the requests, int64."""
    block = _kernel_table(job, inputs)[request, state // job.block_size]
    return block * job.block_size + state % job.block_size


def _request(job: TensorJob, inputs: DecodeInputs) -> Outs:
    return (_Tokens.of(job, inputs).request,)


def _window(job: TensorJob, inputs: DecodeInputs) -> Outs:
    tokens = _Tokens.of(job, inputs)
    column = torch.arange(job.window, device=tokens.position.device)
    # All that a window of this size could see.
    seen = tokens.position[:, None] - column
    first = inputs.replay_start[tokens.request].clamp(min=0)
    length = ((seen >= first[:, None]) & tokens.cached[:, None]).sum(1)
    # What it does see lies in order at the start of the row.
    filled = column < length[:, None]
    oldest = tokens.position + 1 - length
    position = torch.where(filled, oldest[:, None] + column, 0)
    slot = _slots(job, inputs, tokens.request[:, None], position)
    return tokens.cached, length, torch.where(filled, slot, -1)


def _compressed_slot(job: TensorJob, inputs: DecodeInputs) -> Outs:
    tokens = _Tokens.of(job, inputs)
    completes = tokens.position % job.ratio == job.ratio - 1
    slot = _slots(job, inputs, tokens.request, tokens.position // job.ratio)
    return (torch.where(tokens.real & tokens.cached & completes, slot, -1),)


def _ring_slot(job: TensorJob, inputs: DecodeInputs) -> Outs:
    tokens = _Tokens.of(job, inputs)
    block = _kernel_table(job, inputs)[tokens.request, 0]
    slot = block * job.block_size + inputs.positions % job.block_size
    return (torch.where(tokens.real & (block != 0), slot, -1),)


def _context(job: TensorJob, inputs: DecodeInputs) -> Outs:
    tokens = _Tokens.of(job, inputs)
    states = torch.where(tokens.real, (tokens.position + 1) // job.ratio, 0)
    padding = (~tokens.real).cumsum(0) - 1
    row = torch.where(tokens.real, tokens.request, inputs.num_reqs + padding)
    outs = states, inputs.query_start_loc.diff(), torch.ones_like(states), row
    return tuple(
        None if given is None else out
        for given, out in zip(job.outs, outs, strict=True)
    )


def _table(job: TensorJob, inputs: DecodeInputs, per_token: bool) -> Outs:
    (out,) = job.outs
    assert out is not None
    blocks = _kernel_table(job, inputs)[:, : out.shape[1]]
    if not per_token:
        return (blocks,)
    tokens = _Tokens.of(job, inputs)
    null = torch.arange(blocks.shape[1], device=blocks.device) % job.split
    return (torch.where(tokens.real[:, None], blocks[tokens.request], null),)


def schedule(units: torch.Tensor, workers: int) -> torch.Tensor:
    """Where the ``workers`` begin, [workers + 1, 2] int64.

    Each item has so many ``units`` [items]; see ``Kind.SCHEDULE``.
    """
    units = units.long()
    ends = units.cumsum(0)
    worker = torch.arange(workers + 1, device=units.device)
    shares = ends[-1] // workers + (worker >= workers - ends[-1] % workers)
    begins = shares.cumsum(0) - shares
    item = torch.searchsorted(ends, begins, right=True)
    last = item == units.numel()
    within = begins - (ends - units)[torch.where(last, 0, item)]
    return torch.stack((item, torch.where(last, 0, within)), 1)


def _schedule(job: TensorJob, inputs: DecodeInputs) -> Outs:
    tokens = _Tokens.of(job, inputs)
    states = torch.where(tokens.real, (tokens.position + 1) // job.ratio, 0)
    lasts = states[job.item_tokens - 1 :: job.item_tokens]
    return (schedule(-(-lasts // job.block_size), job.workers),)


_REFERENCES: dict[Kind, Callable[[TensorJob, DecodeInputs], Outs]] = {
    Kind.REQUEST: _request,
    Kind.WINDOW: _window,
    Kind.COMPRESSED_SLOT: _compressed_slot,
    Kind.RING_SLOT: _ring_slot,
    Kind.CONTEXT: _context,
    Kind.TABLE: partial(_table, per_token=False),
    Kind.TOKEN_TABLE: partial(_table, per_token=True),
    Kind.SCHEDULE: _schedule,
}


def reference(job: TensorJob, inputs: DecodeInputs) -> Outs:
    """The values that belong into each of ``job.outs``; None where it has none."""
    return _REFERENCES[job.kind](job, inputs)
