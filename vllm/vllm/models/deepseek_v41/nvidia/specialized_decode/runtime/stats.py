# SPDX-License-Identifier: Apache-2.0
"""Counters of the recorded attention-metadata builds, and the lines they log."""

import time
from collections import Counter
from dataclasses import dataclass, field

from .eligibility import Eager

_LOG_INTERVAL_S = 10.0


@dataclass
class MetadataGraphStats:
    """How the metadata of this rank's steps was built since start-up."""

    replayed: int = 0
    eager: Counter[Eager] = field(default_factory=Counter)
    _logged_at: float = field(default_factory=time.monotonic, repr=False)
    _logged_steps: int = field(default=0, repr=False)

    @property
    def missed(self) -> int:
        return self.eager[Eager.UNRECORDED]

    @property
    def full_decode_steps(self) -> int:
        """Steps that ran a FULL CUDA graph on real requests."""
        return self.replayed + sum(
            count for why, count in self.eager.items() if why.in_full_decode_step
        )

    def line(self) -> str:
        """``decode metadata: replayed=... missed=...`` for logs and tools."""
        steps = self.full_decode_steps
        reasons = ", ".join(
            f"{why}={count}" for why, count in sorted(self.eager.items()) if count
        )
        return (
            f"decode metadata: replayed={self.replayed} missed={self.missed} "
            f"ineligible={steps - self.replayed - self.missed} "
            f"full_decode_steps={steps}" + (f" ({reasons})" if reasons else "")
        )

    def line_if_due(self) -> str | None:
        """``line()`` where FULL decode steps ran since the last one that was due
        and some seconds have passed."""
        now = time.monotonic()
        if now - self._logged_at < _LOG_INTERVAL_S:
            return None
        self._logged_at = now
        if self.full_decode_steps == self._logged_steps:
            return None
        self._logged_steps = self.full_decode_steps
        return self.line()


@dataclass(frozen=True)
class RecordingReport:
    """What one recording session left behind."""

    recordings: int
    keys: int
    seconds: float
    mib: float
    stopped: str | None = None

    def line(self) -> str:
        text = (
            f"recorded {self.recordings} of {self.keys} attention-metadata builds in "
            f"{self.seconds:.2f} s and {self.mib:.0f} MiB"
        )
        if self.stopped is not None:
            text += f"; stopped: {self.stopped}; the other shapes build eagerly"
        return text
