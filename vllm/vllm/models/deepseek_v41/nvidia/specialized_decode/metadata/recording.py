# SPDX-License-Identifier: Apache-2.0
"""What start-up does for the FULL graphs that do not refresh their own metadata."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from ..deployment import MetadataGraphs
from ..runtime.metadata_graphs import AttnMetadataCudaGraphs
from ..tp_group import agreed, gathered, rank
from .graph_capture import record
from .key import GraphKey
from .padded_builds import PaddedBuilds
from .proven_builds import ProvenBuilds, in_brief
from .stats import Way

logger = init_logger(__name__)

# A recording takes milliseconds and well under a MiB. Far beyond that something
# is wrong, and the start-up of the server and its KV cache come first.
MAX_SECONDS = 60.0
MAX_MIB = 1024.0


@dataclass(frozen=True)
class Report:
    """How the steps of the FULL graphs get their metadata on this rank, by graph, the
    largest first.
    """

    ways: tuple[Way, ...]
    seconds: float
    mib: float
    stopped: str | None = None

    @property
    def served(self) -> Counter[Way]:
        """Graphs whose steps need no eager build."""
        return Counter(way for way in self.ways if way != Way.EAGER)

    def line(self) -> str:
        """It as one line for the log."""
        ways = Counter(self.ways)
        counts = ", ".join(f"{ways[way]} {way}" for way in Way if ways[way])
        text = (
            f"metadata of {len(self.ways)} FULL graphs: {counts or 'none'}; took "
            f"{self.seconds:.2f} s and {self.mib:.0f} MiB"
        )
        if self.stopped is not None:
            text += f"; stopped: {self.stopped}"
        return text


def log_over_ranks(report: Report) -> None:
    """Log the ``report`` of the TP group's first rank, and of each rank whose steps get
    their metadata in other ways: a step takes as long as on the slowest. Collective
    over the group.
    """
    ways = gathered(report.ways)
    here = rank()
    others = [str(other) for other, its in enumerate(ways) if its != ways[0]]
    if here == 0:
        differs = f"; other ways on TP ranks {', '.join(others)}" if others else ""
        logger.info("DeepSeek-V4.1 decode: %s%s.", report.line(), differs)
    elif ways[here] != ways[0]:
        logger.warning(
            "DeepSeek-V4.1 decode: TP rank %d, other than rank 0: %s.",
            here,
            report.line(),
        )


@dataclass(frozen=True)
class Recorder:
    """Takes the builds of FULL graphs off the host, in the best way that
    ``metadata_graphs`` allows and that is proven. The TP group ends it together, as a
    rank that goes on alone makes no step faster.
    """

    graphs: AttnMetadataCudaGraphs
    proven: ProvenBuilds
    builds: PaddedBuilds
    metadata_graphs: MetadataGraphs

    def record_all(self, keys: Iterable[GraphKey], spent: float) -> Report:
        """Record the build of each key that has none, the largest first, after
        ``spent`` seconds of proofs for those that have one; collective over the TP
        group, with the same ``keys``.

        A failure on any rank ends this on all, not the start-up: what is recorded by
        then serves, and every other step builds eagerly.
        """
        keys = sorted(keys, key=lambda key: key[::-1], reverse=True)
        stopped = None
        if not self.graphs.can_record(self.builds.attn_groups):
            stopped = "a builder is unknown"
        start = time.perf_counter()
        free_bytes = torch.cuda.mem_get_info()[0]
        seconds = mib = 0.0
        for key in keys:
            if not all(agreed(stopped is None)):
                stopped = stopped or "another TP rank did"
                break
            if key in self.graphs:
                continue
            try:
                self._record(key)
            except Exception as error:
                logger.exception("Recording the attention-metadata build failed.")
                stopped = in_brief(error)
            seconds = time.perf_counter() - start
            mib = max(0, free_bytes - torch.cuda.mem_get_info()[0]) / 2**20
            if stopped is None and seconds > MAX_SECONDS:
                stopped = f"over the budget of {MAX_SECONDS:.0f} s"
            if stopped is None and mib > MAX_MIB:
                stopped = f"over the budget of {MAX_MIB:.0f} MiB"
        ways = tuple(map(self.graphs.way, keys))
        return Report(ways, spent + seconds, mib, stopped)

    def _record(self, key: GraphKey) -> None:
        builds = self.builds
        build_upstream = builds.by_upstream(key)
        attn_metadata = build_upstream(builds.attn_groups)
        fused = builds.fused(key, attn_metadata)
        if fused is not None:
            fused = self.proven.prove(fused, build_upstream, builds.max_len)
        if self.metadata_graphs == MetadataGraphs.LAUNCH:
            if fused is not None:
                self.graphs.keep(key, Way.LAUNCH, attn_metadata, fused.launch, fused)
        elif fused is not None:
            _, graph = record(fused.launch, self.graphs.vllm_config)
            self.graphs.keep(key, Way.REPLAY, attn_metadata, graph.replay, fused)
        elif key not in builds.max_query_lens:
            # What builders launch for uneven queries may follow from host lengths.
            tables = builds.inputs(key).block_tables
            self.graphs.capture(key, builds.attn_groups, tables, build_upstream)
