"""TP groups of real processes, each rank of which runs the same function."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
_TIMEOUT = timedelta(seconds=120)


def on_ranks(work: Callable[[int], _T], world_size: int, folder: Path) -> list[_T]:
    """What ``work`` returns, given the rank, on each rank. ``folder`` is an empty one.

    A rank that waits for a collective that another does not come to fails.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(world_size, mp_context=spawn) as pool:
        ranks = [
            pool.submit(_run, work, rank, world_size, str(folder / "store"))
            for rank in range(world_size)
        ]
        return [rank.result() for rank in ranks]


def _run(work: Callable[[int], _T], rank: int, world_size: int, store: str) -> _T:
    from vllm.models.deepseek_v41.nvidia.specialized_decode import tp_group

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    group = SimpleNamespace(
        cpu_group=dist.group.WORLD, world_size=world_size, rank_in_group=rank
    )
    tp_group.get_tp_group = lambda: group
    try:
        return work(rank)
    finally:
        dist.destroy_process_group()
