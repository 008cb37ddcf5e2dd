# SPDX-License-Identifier: Apache-2.0
"""Counters of the ways in which steps got their metadata, and the lines they log."""

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from .key import Eager

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
    verified: int = 0
    """Served steps that were held to upstream's build."""
    eager: Counter[Eager] = field(default_factory=Counter)
    line_due: float = field(
        default_factory=lambda: time.monotonic() + _LOG_INTERVAL_S, repr=False
    )
    """When ``due_line`` is to be asked for next, in ``time.monotonic()``."""
    _logged_steps: int = field(default=0, repr=False)
    # What take() has reported: in_graph, and the rest by way and reason.
    _taken_in_graph: int = field(default=0, repr=False)
    _taken: Counter[tuple[str, str]] = field(default_factory=Counter, repr=False)

    @property
    def served(self) -> Counter[Way]:
        """Steps without an eager build."""
        return self.refreshed + Counter({Way.IN_GRAPH: self.in_graph})

    @property
    def missed(self) -> int:
        """Steps whose key had no recording."""
        return self.eager[Eager.UNRECORDED]

    @property
    def ways(self) -> Counter[Way]:
        """Steps that ran a FULL CUDA graph."""
        without = Eager.NOT_FULL, Eager.BEYOND_GRAPHS
        eager = sum(n for why, n in self.eager.items() if why not in without)
        return self.served + Counter({Way.EAGER: eager})

    @property
    def full_decode_steps(self) -> int:
        """Steps that ran a FULL CUDA graph, whatever the way."""
        return self.ways.total()

    @property
    def decode_steps(self) -> int:
        """Of which the log tells: those, and those that no FULL graph is large
        enough for.
        """
        return self.full_decode_steps + self.eager[Eager.BEYOND_GRAPHS]

    def take(self) -> list[tuple[str, str, int]]:
        """The steps since the last call, as (way, reason, steps).

        The reason is empty but for eager builds. Plain strings, because they go to
        processes that do not know this module.
        """
        new = []
        if self.in_graph != self._taken_in_graph:
            new.append(("in_graph", "", self.in_graph - self._taken_in_graph))
            self._taken_in_graph = self.in_graph
        # Of most steps that is all: no Counter is made for those.
        others = sum(self.refreshed.values()) + sum(self.eager.values())
        if others != sum(self._taken.values()):
            counted = Counter({(str(way), ""): n for way, n in self.refreshed.items()})
            for why, n in self.eager.items():
                counted[str(Way.EAGER), str(why)] = n
            new += [(*labels, n) for labels, n in (counted - self._taken).items()]
            self._taken = counted
        return new

    def line(self) -> str:
        """``decode metadata: in_graph=... replay=... launch=... eager=...``, and the
        reasons of all eager builds, for logs and tools.
        """
        ways = self.ways
        counts = " ".join(f"{way}={ways[way]}" for way in Way)
        reasons = ", ".join(
            f"{why}={count}" for why, count in sorted(self.eager.items()) if count
        )
        verified = f" verified={self.verified}" if self.verified else ""
        return (
            f"decode metadata: {counts} full_decode_steps={ways.total()}{verified}"
            + (f" ({reasons})" if reasons else "")
        )

    def due_line(self) -> str | None:
        """``line()``, or None where there was no decode step since the last one;
        sets ``line_due`` anew.
        """
        self.line_due = time.monotonic() + _LOG_INTERVAL_S
        if self.decode_steps == self._logged_steps:
            return None
        self._logged_steps = self.decode_steps
        return self.line()
