# SPDX-License-Identifier: Apache-2.0
"""Counters of the ways in which steps got their metadata, and the lines they log."""

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from .eligibility import Eager

_LOG_INTERVAL_S = 10.0


class Way(StrEnum):
    """How the metadata of a FULL step is refreshed, the best way first."""

    IN_GRAPH = "in_graph"
    """The forward graph refreshes it."""
    REPLAY = "replay"
    """A CUDA graph of its own is replayed before the forward graph."""
    LAUNCH = "launch"
    """A fused build is launched before the forward graph."""
    EAGER = "eager"
    """Upstream's builders run on the host."""


@dataclass
class MetadataGraphStats:
    """How the metadata of this rank's steps was built since start-up."""

    refreshed: Counter[Way] = field(default_factory=Counter)
    in_graph: int = 0
    """Steps of ``Way.IN_GRAPH`` beyond those in ``refreshed``: all their host does
    is to count, and a Counter would take as long as the rest."""
    eager: Counter[Eager] = field(default_factory=Counter)
    line_due: float = field(
        default_factory=lambda: time.monotonic() + _LOG_INTERVAL_S, repr=False
    )
    """When ``due_line`` is to be asked for next, in ``time.monotonic()``."""
    _logged_steps: int = field(default=0, repr=False)

    @property
    def served(self) -> Counter[Way]:
        """Steps without an eager build."""
        return self.refreshed + Counter({Way.IN_GRAPH: self.in_graph})

    @property
    def missed(self) -> int:
        return self.eager[Eager.UNRECORDED]

    @property
    def ways(self) -> Counter[Way]:
        """Steps that ran a FULL CUDA graph, without the dummy ones that were built
        eagerly."""
        eager = sum(n for why, n in self.eager.items() if why.in_full_decode_step)
        return self.served + Counter({Way.EAGER: eager})

    @property
    def full_decode_steps(self) -> int:
        return self.ways.total()

    def line(self) -> str:
        """``decode metadata: in_graph=... replay=... launch=... eager=...``, and the
        reasons of all eager builds, for logs and tools."""
        ways = self.ways
        counts = " ".join(f"{way}={ways[way]}" for way in Way)
        reasons = ", ".join(
            f"{why}={count}" for why, count in sorted(self.eager.items()) if count
        )
        return f"decode metadata: {counts} full_decode_steps={ways.total()}" + (
            f" ({reasons})" if reasons else ""
        )

    def due_line(self) -> str | None:
        """``line()``, or None where no FULL decode step ran since the last one;
        sets ``line_due`` anew."""
        self.line_due = time.monotonic() + _LOG_INTERVAL_S
        if self.full_decode_steps == self._logged_steps:
            return None
        self._logged_steps = self.full_decode_steps
        return self.line()


@dataclass(frozen=True)
class RecordingReport:
    """How the steps of the FULL graphs get their metadata after start-up."""

    served: Counter[Way]
    keys: int
    seconds: float
    mib: float
    stopped: str | None = None

    def line(self) -> str:
        ways = self.served + Counter({Way.EAGER: self.keys - self.served.total()})
        counts = ", ".join(f"{ways[way]} {way}" for way in Way if ways[way])
        text = (
            f"metadata of {self.keys} FULL graphs: {counts or 'none'}; took "
            f"{self.seconds:.2f} s and {self.mib:.0f} MiB"
        )
        if self.stopped is not None:
            text += f"; stopped: {self.stopped}"
        return text
