# SPDX-License-Identifier: Apache-2.0
"""Counters of the recorded attention-metadata builds, and the lines they log."""

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from .eligibility import Eager

_LOG_INTERVAL_S = 10.0


class Served(StrEnum):
    """How the metadata of a FULL step is refreshed without an eager build."""

    IN_GRAPH = "in_graph"
    """The forward graph refreshes it."""
    REPLAYED = "replayed"
    """A CUDA graph of its own is replayed before the forward graph."""
    LAUNCHED = "launched"
    """A fused build is launched before the forward graph."""


@dataclass
class MetadataGraphStats:
    """How the metadata of this rank's steps was built since start-up."""

    refreshed: Counter[Served] = field(default_factory=Counter)
    in_graph: int = 0
    """Steps of ``Served.IN_GRAPH`` beyond those in ``refreshed``: all their host does
    is to count, and a Counter would take as long as the rest."""
    eager: Counter[Eager] = field(default_factory=Counter)
    line_due: float = field(
        default_factory=lambda: time.monotonic() + _LOG_INTERVAL_S, repr=False
    )
    """When ``due_line`` is to be asked for next, in ``time.monotonic()``."""
    _logged_steps: int = field(default=0, repr=False)

    @property
    def served(self) -> Counter[Served]:
        return self.refreshed + Counter({Served.IN_GRAPH: self.in_graph})

    @property
    def replayed(self) -> int:
        return self.served[Served.REPLAYED]

    @property
    def missed(self) -> int:
        return self.eager[Eager.UNRECORDED]

    @property
    def full_decode_steps(self) -> int:
        """Steps that ran a FULL CUDA graph, without the dummy ones that were built
        eagerly."""
        return self.served.total() + sum(
            count for why, count in self.eager.items() if why.in_full_decode_step
        )

    def line(self) -> str:
        """``decode metadata: in_graph=... replayed=... launched=... missed=...`` for
        logs and tools."""
        steps = self.full_decode_steps
        served = " ".join(f"{way}={self.served[way]}" for way in Served)
        reasons = ", ".join(
            f"{why}={count}" for why, count in sorted(self.eager.items()) if count
        )
        return (
            f"decode metadata: {served} missed={self.missed} "
            f"ineligible={steps - self.served.total() - self.missed} "
            f"full_decode_steps={steps}" + (f" ({reasons})" if reasons else "")
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
    """How the keys of the FULL graphs are served after a recording session."""

    served: Counter[Served]
    keys: int
    seconds: float
    mib: float
    stopped: str | None = None

    def line(self) -> str:
        counts = ", ".join(
            f"{self.served[way]} {words}"
            for way, words in (
                (Served.IN_GRAPH, "in the forward graphs"),
                (Served.REPLAYED, "recorded"),
                (Served.LAUNCHED, "launched"),
            )
            if self.served[way]
        )
        text = (
            f"of {self.keys} attention-metadata builds {counts or 'none recorded'}, in "
            f"{self.seconds:.2f} s and {self.mib:.0f} MiB"
        )
        if self.stopped is not None:
            text += f"; stopped: {self.stopped}; the other shapes build eagerly"
        return text
