"""Start-ups of a TP group in which a rank fares worse than the others."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.models.deepseek_v41.nvidia.specialized_decode.deployment import (
    MetadataGraphs,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata import recording
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.in_graph import (
    InGraphBuilds,
)
from vllm.models.deepseek_v41.nvidia.specialized_decode.metadata.key import GraphKey
from vllm.models.deepseek_v41.nvidia.specialized_decode.runtime.metadata_graphs import (
    AttnMetadataCudaGraphs,
)

LARGE, MIDDLE, SMALL = (GraphKey.padded(n, n) for n in (4, 2, 1))
WORSE = 1
"""The rank that has the fault."""


class Fault(StrEnum):
    NONE = "none"
    SLOW = "its first recording takes longer than the budget"
    RAISES = "its second recording raises"
    UNPROVEN = "its last build is not proven"
    UNKNOWN = "it has an unknown builder"


@dataclass
class Outcome:
    ways: tuple[str, ...]
    stopped: str | None
    lines: list[str]


@dataclass
class _Log:
    lines: list[str]

    def info(self, text: str, *args: object) -> None:
        self.lines.append(text % args)

    warning = info

    def exception(self, text: str) -> None: ...


class _Graphs(AttnMetadataCudaGraphs):
    def __init__(self, knows_builders: bool) -> None:
        super().__init__(None, 1, {})
        self._knows_builders = knows_builders

    def can_record(self, attn_groups: object) -> bool:
        return self._knows_builders


class _Machine:
    """Builds, proofs and the clock of a rank."""

    attn_groups = ()
    max_len = 1

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def by_upstream(self, key: GraphKey) -> Callable[[object], dict]:
        if self.fault == Fault.SLOW:
            self.now += 2 * recording.MAX_SECONDS
        if (self.fault, key) == (Fault.RAISES, MIDDLE):
            raise RuntimeError("no memory")
        return lambda groups: {}

    def fused(self, key: GraphKey, attn_metadata: dict) -> SimpleNamespace:
        return SimpleNamespace(key=key, launch=lambda: None)

    def prove(self, build: SimpleNamespace, *_: object) -> SimpleNamespace | None:
        unproven = (self.fault, build.key) == (Fault.UNPROVEN, SMALL)
        return None if unproven else build


def record(rank: int) -> dict[Fault, Outcome]:
    """What a rank records and logs, by the fault of ``WORSE``."""
    return {fault: _record(fault if rank == WORSE else Fault.NONE) for fault in Fault}


def _record(fault: Fault) -> Outcome:
    machine, log = _Machine(fault), _Log([])
    with (
        patch.object(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31)),
        patch.object(recording, "time", machine),
        patch.object(recording, "logger", log),
    ):
        recorder = recording.Recorder(
            _Graphs(fault != Fault.UNKNOWN), machine, machine, MetadataGraphs.LAUNCH
        )
        report = recorder.record_all({SMALL, LARGE, MIDDLE}, spent=0.0)
        recording.log_over_ranks(report)
    return Outcome(tuple(map(str, report.ways)), report.stopped, log.lines)


def warm_up(rank: int) -> list[GraphKey]:
    """The builds that a rank proves in the warm-ups of its forward graphs, of which
    ``WORSE`` takes too long for the second.
    """
    proven = []
    in_graph = InGraphBuilds(
        SimpleNamespace(prove=lambda build, *_: proven.append(build.key)), 60.0
    )
    for key in (LARGE, MIDDLE, SMALL):
        in_graph.agree_on_budget()
        in_graph.warm_up(SimpleNamespace(key=key), None, 1)
        if (rank, key) == (WORSE, MIDDLE):
            in_graph.seconds += 100.0
    return proven


def start_up(rank: int) -> tuple[dict[Fault, Outcome], list[GraphKey]]:
    """All of the above."""
    return record(rank), warm_up(rank)
