# SPDX-License-Identifier: Apache-2.0
"""Whether a fused build writes what upstream's builders write, on this machine.

A wrong metadata buffer is a silently wrong answer, and neither tests nor types
know every layout a deployment may have. So every fused build is held to upstream's
builders before it serves: on random decode steps, every byte that those builders
write must come out the same. This runs at start-up and may wait for the device.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .fused_build import BuildFn, FusedBuild
from .jobs import DecodeInputs
from .tensors import View, tensors


class _Round(NamedTuple):
    """What one comparison is made on."""

    # Overwrites what a build has to write; a bool can hold only these two.
    poison: int
    # How often a block past the first is negative, and a token not to be cached,
    # each KV-cache group on its own.
    no_block: float = 0.0
    no_slot: float = 0.0
    # Whether the last token of every request completes a compressed state.
    completes: bool = True


# In the smallest shape a step has a single token: each round shows what the
# others hide.
_ROUNDS = (
    _Round(0x7F),
    _Round(0, no_block=0.8, completes=False),
    _Round(0x7F, no_block=0.5, no_slot=0.5),
)
_LARGEST_RATIO = 2


def difference_from_upstream(
    build: FusedBuild, build_upstream: BuildFn, max_len: int
) -> str | None:
    """The path of the first tensor that ``build`` leaves other than
    ``build_upstream``, which calls the builders of attention groups for the same
    padded shape, or None. Sequences are up to ``max_len`` tokens long.

    Leaves the inputs and the metadata as they were, whatever happens: a forward
    may follow.
    """
    inputs = build.inputs
    outputs = _outputs(build)
    with _restored(inputs.tensors()), _restored(outputs.values()) as kept:
        before = dict(zip(outputs, kept, strict=True))
        for seed, each in enumerate(_ROUNDS):
            poison = each.poison
            _write_random_step(inputs, max_len, seed, each)
            step = [tensor.clone() for tensor in inputs.tensors()]
            _fill(outputs, poison)
            build_upstream(build.attn_groups)
            wanted = {path: tensor.clone() for path, tensor in outputs.items()}
            tables = [table.clone() for table in inputs.block_tables]
            _fill(outputs, poison)
            # What upstream leaves alone, the forward keeps to itself.
            unwritten = [path for path in wanted if _is(wanted[path], poison)]
            for path in unwritten:
                outputs[path].copy_(before[path])
            # Builders clamp tables in place.
            for tensor, value in zip(inputs.tensors(), step, strict=True):
                tensor.copy_(value)
            build.launch()
            for path, want in wanted.items():
                got = outputs[path]
                if path in unwritten and torch.equal(got, before[path]):
                    continue
                if not torch.equal(got, want):
                    return path
            for index, want in enumerate(tables):
                if not torch.equal(inputs.block_tables[index], want):
                    return f"block table {index}"
    return None


def _outputs(build: FusedBuild) -> dict[str, torch.Tensor]:
    """The device tensors of the metadata that are no inputs, each view once."""
    storages = {_storage(tensor) for tensor in build.inputs.tensors()}
    device = build.inputs.seq_lens.device
    views = {
        View.of(tensor): (path, tensor)
        for path, tensor in tensors(build.attn_metadata)
        if tensor.numel()
        and tensor.device == device
        and not path.endswith("_cpu")
        and _storage(tensor) not in storages
    }
    return dict(views.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as(tensor: torch.Tensor, poison: int) -> int | bool:
    return bool(poison) if tensor.dtype == torch.bool else poison


def _is(tensor: torch.Tensor, poison: int) -> bool:
    return bool((tensor == _as(tensor, poison)).all())


def _fill(outputs: dict[str, torch.Tensor], poison: int) -> None:
    for tensor in outputs.values():
        tensor.fill_(_as(tensor, poison))


@contextmanager
def _restored(arrays: Collection[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """What ``arrays`` hold now, and hold again in the end."""
    values = [tensor.clone() for tensor in arrays]
    try:
        yield values
    finally:
        for tensor, value in zip(arrays, values, strict=True):
            tensor.copy_(value)


def _write_random_step(
    inputs: DecodeInputs, max_len: int, seed: int, round_: _Round
) -> None:
    """A uniform decode step, the first one with padding, if the shape has room."""
    # On the device: tables are wide where contexts are long.
    device = inputs.seq_lens.device
    random = torch.Generator(device).manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random, device=device)

    def some(share: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random, device=device) < share

    padded = inputs.num_reqs
    query_len = inputs.num_tokens // padded
    num_reqs = padded - (seed == 0 and padded > 1)
    num_tokens = num_reqs * query_len
    starts = torch.arange(padded + 1, device=device) * query_len
    starts.clamp_(max=num_tokens)
    lens = integers(query_len, max_len, padded)
    if round_.completes:
        lens += -lens % _LARGEST_RATIO
    lens[num_reqs:] = 0
    positions = integers(0, max_len, inputs.num_tokens)
    offsets = torch.arange(query_len, device=device) - query_len
    positions[:num_tokens] = (lens[:num_reqs, None] + offsets).flatten()
    slots = integers(0, 2**20, *inputs.slot_mappings.shape)
    slots[some(round_.no_slot, *slots.shape)] = -1
    slots[:, num_tokens:] = -1
    replay_start = (integers(0, max_len, padded) - max_len // 2).clamp(0)
    values = [starts, lens, positions, torch.minimum(replay_start, lens)]
    for table in inputs.block_tables:
        blocks = integers(1, 2**20, *table.shape)
        # What lies past a request's blocks may be anything.
        blocks[:, 1:][some(round_.no_block, padded, table.shape[1] - 1)] = -1
        blocks[num_reqs:] = 0
        values.append(blocks)
    for tensor, value in zip(inputs.tensors(), [*values, slots], strict=True):
        tensor.copy_(value)
