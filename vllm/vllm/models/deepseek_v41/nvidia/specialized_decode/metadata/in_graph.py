# SPDX-License-Identifier: Apache-2.0
"""The metadata build at the head of the FULL forward graphs.

A graph that was captured with the build before the forward refreshes its own
metadata from device data on every replay: the host has nothing left to do.
"""

import time
from typing import Any

from ..tp_group import agreed
from .fused_build import FusedBuild, UpstreamBuild
from .key import GraphKey
from .proven_builds import ProvenBuilds


class InGraphBuilds:
    """What the capture of FULL graphs calls, and which keys then serve themselves.

    The runner warms a forward up before it captures it: the warm-up proves the
    build, the capture takes it in only if it was proven. After ``max_seconds`` of
    proofs on any rank of the TP group no more keys are taken in on all of them.
    """

    def __init__(self, proven: ProvenBuilds, max_seconds: float) -> None:
        self._proven = proven
        self._max_seconds = max_seconds
        # Spent so far on proving the builds of a capture.
        self.seconds = 0.0
        self._has_time = True
        # Metadata that no forward has been given.
        self._metadata: dict[GraphKey, dict[str, Any]] = {}
        # The builds in captured graphs, whose tables of jobs those read.
        self._captured: dict[GraphKey, list[FusedBuild]] = {}
        # Keys of which some graph was captured without its build.
        self._left_out: set[GraphKey] = set()

    def agree_on_budget(self) -> None:
        """See whether there is time for one more proof; collective over the TP group,
        and before every warm-up.
        """
        if self._has_time:
            [self._has_time] = agreed(self.seconds <= self._max_seconds)

    def warm_up(
        self, build: FusedBuild, build_upstream: UpstreamBuild, max_len: int
    ) -> None:
        """Prove ``build`` and run it before the forward that reads its metadata."""
        if not self._has_time:
            return
        start = time.perf_counter()
        proven = self._proven.prove(build, build_upstream, max_len)
        if proven is not None:
            self._metadata[build.key] = build_upstream(build.attn_groups)
            proven.launch()
        self.seconds += time.perf_counter() - start

    def capture(self, build: FusedBuild) -> None:
        """Run ``build`` at the head of the forward that is being captured."""
        proven = self._proven.known(build)
        if proven is None or build.key not in self._metadata:
            self.leave_out(build.key)
            return
        proven.launch()
        self._captured.setdefault(build.key, []).append(proven)

    def leave_out(self, key: GraphKey) -> None:
        """A graph of ``key`` is captured without its build."""
        self._left_out.add(key)

    def captured(self) -> dict[GraphKey, tuple[dict[str, Any], FusedBuild]]:
        """The keys all of whose graphs hold their build, with metadata for whoever
        asks for the step's, and the build.
        """
        return {
            key: (self._metadata[key], builds[-1])
            for key, builds in self._captured.items()
            if key not in self._left_out
        }

    def disable(self, key: GraphKey) -> None:
        """Let the graphs of ``key`` leave their metadata as they find it."""
        for build in self._captured[key]:
            build.disable()

    def release(self) -> None:
        """Forget the graphs of the last capture."""
        self._metadata.clear()
        self._captured.clear()
        self._left_out.clear()
        self.seconds = 0.0
        self._has_time = True
