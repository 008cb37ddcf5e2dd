# SPDX-License-Identifier: Apache-2.0
"""What builds of one shape write, and when two of them have left the same."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .jobs import DecodeInputs
from .kernel import Job, Kind
from .tensors import View, tensors

# Whether rows hold what padding may.
Padding = Callable[[torch.Tensor], bool]


def outputs_of(
    attn_metadata: Mapping[str, Any], inputs: DecodeInputs
) -> dict[str, torch.Tensor]:
    """The device tensors of metadata that are none of its inputs, by path.

    Each view once.
    """
    storages = {_storage(tensor) for tensor in inputs.tensors()}
    views = {
        View.of(tensor): (path, tensor)
        for path, tensor in tensors(attn_metadata)
        if tensor.numel()
        and tensor.device == inputs.seq_lens.device
        and not path.endswith("_cpu")
        and _storage(tensor) not in storages
    }
    return dict(views.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def paddings(
    jobs: Iterable[Job], outputs: Mapping[str, torch.Tensor], num_reqs: int
) -> dict[str, Padding]:
    """By path, what rows of padding may hold that upstream leaves arbitrary after a
    step of fewer tokens than its graph has, and that no kernel reads.
    """
    may_be: dict[Kind, Padding] = {
        # An index, and masked wherever it is used as one.
        Kind.REQUEST: lambda rows: bool(((rows >= 0) & (rows < num_reqs)).all()),
        # Upstream's is in the ring of the first request, where padding writes nothing.
        Kind.RING_SLOT: lambda rows: bool((rows == -1).all()),
        # Without a context no column is read; the first is that of the null block.
        Kind.TOKEN_TABLE: lambda rows: bool((rows[:, 0] == 0).all()),
    }
    kinds = {job.outs[0]: job.kind for job in jobs if job.kind in may_be}
    return {
        path: may_be[kinds[tensor.data_ptr()]]
        for path, tensor in outputs.items()
        if tensor.data_ptr() in kinds
    }


def same_rows(
    ours: torch.Tensor, want: torch.Tensor, real: int, padding: Padding | None
) -> bool:
    """Whether ``ours`` is ``want``; from row ``real`` on, ``padding`` is enough."""
    if torch.equal(ours, want):
        return True
    if padding is None:
        return False
    return torch.equal(ours[:real], want[:real]) and padding(ours[real:])
