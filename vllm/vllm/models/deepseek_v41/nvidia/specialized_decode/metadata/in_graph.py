# SPDX-License-Identifier: Apache-2.0
"""The metadata build at the head of the FULL forward graphs.

A graph that was captured with the build before the forward refreshes its own
metadata from device data on every replay: the host has nothing left to do, and
an idle data-parallel rank, a one-token prefill or any other step that runs the
graph is served alike. For that the build must follow from device data alone, so
only a fused build of all KV-cache groups goes in.
"""

import time
from typing import Any

import torch

from .fused_build import BuildFn, FusedBuild
from .proven_builds import FusedBuilds
from .recordable import without_holders


class InGraphBuilds:
    """What the capture of FULL graphs calls, and which shapes then serve
    themselves. After ``max_seconds`` of proofs no more shapes are taken in."""

    def __init__(self, fused: FusedBuilds, max_seconds: float) -> None:
        self._fused = fused
        self._max_seconds = max_seconds
        # Spent so far on proving the builds of a capture.
        self.seconds = 0.0
        # Per shape, metadata that no forward has been given.
        self._metadata: dict[tuple[int, int], dict[str, Any]] = {}
        # The builds in captured graphs, whose tables of jobs those read.
        self._captured: dict[tuple[int, int], list[FusedBuild]] = {}
        # Shapes of which some graph was captured without its build.
        self._left_out: set[tuple[int, int]] = set()

    def head(self, build: FusedBuild, build_upstream: BuildFn) -> None:
        """Run ``build`` at the head of a forward that reads its metadata.

        The runner warms a forward up before it captures it: the warm-up proves
        the build, the capture takes it in only if it was proven.
        """
        shape = build.shape
        if torch.cuda.is_current_stream_capturing():
            proven = self._fused.proven(build)
            if proven is None or shape not in self._metadata:
                self._left_out.add(shape)
                return
            proven.launch()
            self._captured.setdefault(shape, []).append(proven)
        elif not any(build.left) and self.seconds <= self._max_seconds:
            start = time.perf_counter()
            proven = self._fused.prove(build, build_upstream)
            if proven is not None:
                metadata = build_upstream(build.attn_groups)
                self._metadata[shape] = without_holders(metadata)
                proven.launch()
            self.seconds += time.perf_counter() - start

    def leave_out(self, shape: tuple[int, int]) -> None:
        """A graph of ``shape`` is captured without its build."""
        self._left_out.add(shape)

    def captured(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The shapes all of whose graphs hold their build, with metadata for
        whoever asks for the step's."""
        return {
            shape: self._metadata[shape]
            for shape in self._captured
            if shape not in self._left_out
        }

    def release(self) -> None:
        """Forget the graphs of the last capture."""
        self._metadata.clear()
        self._captured.clear()
        self._left_out.clear()
        self.seconds = 0.0
