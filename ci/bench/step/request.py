"""What the bench asks of an engine process."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from .record import LeftOut


@dataclass(frozen=True)
class Request:
    """What to measure (words as in ``record.StepRecord``).

    Attributes:
        model: The proxy's folder.
        deadline: Seconds since the epoch; no batch size is begun that would likely
            take longer. None for no limit.
        out: The file of the results.
    """

    layers: int
    rank_of: int
    expert_parallel: bool
    model: str
    path: str
    query_len: int
    batches: tuple[int, ...]
    steps: int
    deadline: float | None
    commit: str
    out: str

    def left_out(self, batches: tuple[int, ...], reason: str) -> LeftOut:
        """That ``batches`` are not measured."""
        return LeftOut(
            self.layers,
            self.rank_of,
            self.expert_parallel,
            self.query_len,
            self.path,
            batches,
            reason,
        )

    def as_json(self) -> str:
        """The request on one line, for ``of``."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Self:
        """The request that ``as_json`` wrote."""
        values = json.loads(text)
        return cls(**values | {"batches": tuple(values["batches"])})
