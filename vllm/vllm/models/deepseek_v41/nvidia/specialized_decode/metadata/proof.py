# SPDX-License-Identifier: Apache-2.0
"""Whether a fused build writes what upstream's builders write, on this machine.

A wrong metadata buffer is a silently wrong answer, and neither tests nor types
know every layout a deployment may have. So every fused build is held to upstream's
builders before it serves: on the decode steps of ``steps.py``, every byte that those
builders write must come out the same. This runs at start-up and may wait for the
device.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .fused_build import BuildFn, FusedBuild
from .steps import decode_steps
from .tensors import View, tensors

# Of device memory for copies at one time: block tables of many long contexts take
# hundreds, and the KV cache has been given all but little of the memory.
_MAX_COPIED = 64 * 2**20


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of a buffer, and what they held before the comparison, on the host."""

    path: str
    now: torch.Tensor
    before: torch.Tensor


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
    *arrays, tables, slot_mappings = inputs
    outputs = _outputs_of(build)
    # Builders clamp tables in place.
    compared = outputs | {f"block table {i}": table for i, table in enumerate(tables)}
    num_reqs, num_tokens = inputs.num_reqs, inputs.num_tokens
    steps = decode_steps(build.jobs, num_reqs, num_tokens // num_reqs, max_len)
    with (
        _restored([*arrays, slot_mappings]),
        _restored(compared.values()) as before,
    ):
        pieces = [
            rows
            for (path, tensor), value in zip(compared.items(), before, strict=True)
            for rows in _rows_of(path, tensor, value)
        ]
        written = [rows for rows in pieces if rows.path in outputs]
        portions = list(_portions(pieces))
        for seed, step in enumerate(steps):
            for portion in portions:
                step.write(inputs, seed)
                _fill(outputs.values(), step.poison)
                build_upstream(build.attn_groups)
                wanted = [rows.now.clone() for rows in portion]
                # What upstream leaves alone, the forward keeps to itself.
                unwritten = {rows for rows in written if _holds(rows.now, step.poison)}
                step.write(inputs, seed)
                _fill(outputs.values(), step.poison)
                for rows in unwritten:
                    rows.now.copy_(rows.before)
                build.launch()
                for rows, want in zip(portion, wanted, strict=True):
                    if torch.equal(rows.now, want):
                        continue
                    # It may also be that upstream writes the poison.
                    if rows in unwritten:
                        want.copy_(rows.before)
                    if not torch.equal(rows.now, want):
                        return rows.path
    return None


def _outputs_of(build: FusedBuild) -> dict[str, torch.Tensor]:
    """The device tensors of the metadata that are no inputs, by path, each view
    once."""
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


def _holds(tensor: torch.Tensor, poison: int) -> bool:
    """Whether ``tensor`` holds nothing but what ``_fill`` put there."""
    return bool((tensor == _as(tensor, poison)).all())


def _fill(outputs: Iterable[torch.Tensor], poison: int) -> None:
    """Overwrite ``outputs`` with ``poison``."""
    for tensor in outputs:
        tensor.fill_(_as(tensor, poison))


@contextmanager
def _restored(arrays: Collection[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """What ``arrays`` hold now, on the host, and hold again in the end."""
    values = [tensor.to("cpu", copy=True) for tensor in arrays]
    try:
        yield values
    finally:
        for tensor, value in zip(arrays, values, strict=True):
            tensor.copy_(value)


def _rows_of(path: str, now: torch.Tensor, before: torch.Tensor) -> Iterator[_Rows]:
    """``now`` and ``before`` in pieces that ``_portions`` can take."""
    if now.nbytes <= _MAX_COPIED:
        yield _Rows(path, now, before)
        return
    each = max(1, _MAX_COPIED // now[0].nbytes)
    for rows, kept in zip(now.split(each), before.split(each), strict=True):
        yield _Rows(path, rows, kept)


def _portions(pieces: Iterable[_Rows]) -> Iterator[list[_Rows]]:
    """``pieces`` in lists of at most ``_MAX_COPIED`` bytes."""
    portion: list[_Rows] = []
    size = 0
    for rows in pieces:
        if portion and size + rows.now.nbytes > _MAX_COPIED:
            yield portion
            portion, size = [], 0
        portion.append(rows)
        size += rows.now.nbytes
    yield portion
