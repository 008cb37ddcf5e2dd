# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a TP group tell each other at start-up, on the host.

``agreed`` and ``gathered`` are collective: all ranks of the group call them, or none.
"""

from typing import TypeVar

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group

_T = TypeVar("_T")


def rank() -> int:
    """This rank's place in the group."""
    return get_tp_group().rank_in_group


def agreed(*here: bool) -> tuple[bool, ...]:
    """What holds on every rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return here
    flags = torch.tensor(here, dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group.cpu_group)
    return tuple(map(bool, flags.tolist()))


def gathered(here: _T) -> list[_T]:
    """What each rank has, by rank. It is pickled on the way."""
    group = get_tp_group()
    if group.world_size == 1:
        return [here]
    ranks: list[_T] = [here] * group.world_size
    dist.all_gather_object(ranks, here, group=group.cpu_group)
    return ranks
