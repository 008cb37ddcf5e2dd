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

from .fused_build import FusedBuild, UpstreamBuild
from .outputs import Padding, outputs_of, paddings, same_rows
from .steps import decode_steps

# Of device memory for copies at one time: block tables of many long contexts take
# hundreds, and the KV cache has been given all but little of the memory.
_MAX_COPIED = 64 * 2**20


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of a buffer, and what they held before the comparison, on the host."""

    path: str
    now: torch.Tensor
    before: torch.Tensor
    first: int = 0
    """Where in the buffer they begin."""

    def same(self, want: torch.Tensor, real: int, padding: Padding | None) -> bool:
        """Whether they hold ``want`` now; from row ``real`` of the buffer on, what is
        ``padding`` will do.
        """
        return same_rows(self.now, want, max(0, real - self.first), padding)


def difference_from_upstream(
    build: FusedBuild, build_upstream: UpstreamBuild, max_len: int
) -> str | None:
    """The path of the first tensor that ``build`` leaves other than
    ``build_upstream``, which builds for the same padded shape, or None. Sequences are
    up to ``max_len`` tokens long.

    Leaves the inputs and the metadata as they were, whatever happens: a forward
    may follow.
    """
    inputs = build.inputs
    *arrays, tables, slot_mappings = inputs
    outputs = outputs_of(build.attn_metadata, inputs)
    # Builders clamp tables in place.
    compared = outputs | {f"block table {i}": table for i, table in enumerate(tables)}
    num_reqs, num_tokens = inputs.num_reqs, inputs.num_tokens
    varlen = build.max_query_len is not None
    padding = paddings(build.jobs, outputs, num_reqs) if varlen else {}
    steps = decode_steps(build.jobs, num_reqs, num_tokens, build.max_query_len, max_len)
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
            query_lens = step.query_lens if varlen else None
            real = sum(step.query_lens)
            for portion in portions:
                step.write(inputs, seed)
                _fill(outputs.values(), step.poison)
                build_upstream(build.attn_groups, query_lens)
                wanted = [rows.now.clone() for rows in portion]
                # What upstream leaves alone, the forward keeps to itself.
                unwritten = {rows for rows in written if _holds(rows.now, step.poison)}
                step.write(inputs, seed)
                _fill(outputs.values(), step.poison)
                for rows in unwritten:
                    rows.now.copy_(rows.before)
                build.launch()
                for rows, want in zip(portion, wanted, strict=True):
                    may_be = padding.get(rows.path)
                    if rows.same(want, real, may_be):
                        continue
                    # It may also be that upstream writes the poison.
                    if rows in unwritten:
                        want.copy_(rows.before)
                    if not rows.same(want, real, may_be):
                        return rows.path
    return None


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
    pieces = zip(now.split(each), before.split(each), strict=True)
    for index, (rows, kept) in enumerate(pieces):
        yield _Rows(path, rows, kept, index * each)


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
