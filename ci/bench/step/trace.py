"""Divides the GPU time of decode steps among parts, from profiler traces.

A trace is what ``torch.profiler`` exports: ``{"traceEvents": [...]}`` with times in
us, with ranges named after ``parts`` and one called
``FORWARD`` in which a FULL forward graph is launched.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ..trace import FORWARD, Launches, Work, covered
from .parts import PREFIX, Part

Key = tuple[str, tuple[int, ...]]


class _Range(NamedTuple):
    start: float
    end: float
    name: str


def _ranges(events: Iterable[dict[str, Any]]) -> list[_Range]:
    """The ranges that we marked, the outer of two before the inner."""
    found = [
        _Range(event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation"
        and (event["name"] == FORWARD or event["name"].startswith(PREFIX))
    ]
    return sorted(found, key=lambda r: (r.start, -r.end))


def _innermost(
    launches: Launches, ranges: Sequence[_Range]
) -> Iterator[tuple[float, str | None, list[Work]]]:
    """Each launch: its time, the name of the innermost range around it, its work.
    Within a draft's range that is the range, whatever the draft model runs.
    """
    # Ranges are nested: what has ended within an open one lies above it.
    opened: list[_Range] = []
    following = iter([*ranges, _Range(float("inf"), float("inf"), "")])
    upcoming = next(following)
    for at, works in launches:
        while upcoming.start <= at:
            _close(opened, upcoming.start)
            opened.append(upcoming)
            upcoming = next(following)
        _close(opened, at)
        draft = next((r for r in opened if r.name == Part.DRAFT.range), None)
        innermost = draft or (opened[-1] if opened else None)
        yield at, innermost.name if innermost else None, works


def _close(opened: list[_Range], at: float) -> None:
    while opened and opened[-1].end < at:
        opened.pop()


def _part(name: str | None) -> Part:
    return Part(name.removeprefix(PREFIX)) if name else Part.OTHER


class Reference:
    """The parts of the launches in a FULL graph, from the trace of a run of the same
    forward launch by launch.

    A launch is known by its name, grid and block. Where those are launched for more
    than one part, the n-th of them in a step is what the n-th was here, in the order
    of launches, provided that there are as many.
    """

    def __init__(self, trace: dict[str, Any]) -> None:
        events = trace["traceEvents"]
        self._parts: dict[Key, list[Part]] = defaultdict(list)
        self._by_name: dict[str, set[Part]] = defaultdict(set)
        for _, name, works in _innermost(Launches(events), _ranges(events)):
            for work in works:
                part = _part(name)
                self._parts[work.name, work.shape].append(part)
                self._by_name[work.name].add(part)

    @property
    def launches(self) -> int:
        """How many launches the map knows."""
        return sum(map(len, self._parts.values()))

    def parts(self, works: Sequence[Work]) -> list[Part | None]:
        """The part of each of ``works``, by start: all of a step's FULL graph. None
        where it cannot be told.
        """
        counts = Counter((work.name, work.shape) for work in works)
        seen: Counter[Key] = Counter()
        found = []
        for work in works:
            key = work.name, work.shape
            found.append(self._of(key, seen[key], counts[key]))
            seen[key] += 1
        return found

    def _of(self, key: Key, index: int, count: int) -> Part | None:
        parts = self._parts.get(key, [])
        if len(parts) == count:
            return parts[index]
        # As many or not, if all are of one part there is no doubt.
        possible = set(parts) or self._by_name.get(key[0], set())
        return next(iter(possible)) if len(possible) == 1 else None


@dataclass
class PartTime:
    """One part of a step, us.

    Attributes:
        launches: Kernels, copies and fills.
        us: The sum of their times.
        busy_us: Time in which any of them ran.
        span_us: Time by which they moved the end of the step on: from the end of
            all before to their own end, gaps included. The spans of a step's parts
            add up to its time; what runs beside something longer has none.
    """

    launches: float = 0
    us: float = 0
    busy_us: float = 0
    span_us: float = 0


@dataclass
class StepTime:
    """The GPU time of one step, or of the mean of several."""

    parts: dict[Part, PartTime] = field(default_factory=dict)
    # Launches and us by name, of what is of no part.
    other: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Of those, launches in the FULL graph whose part could not be told.
    untold: float = 0
    # Of all launches together, overlaps counted once.
    busy_us: float = 0

    @property
    def span_us(self) -> float:
        """From the step's first launch to its end, us."""
        return sum(part.span_us for part in self.parts.values())

    @property
    def launches(self) -> float:
        """Launches of a step."""
        return sum(part.launches for part in self.parts.values())


# The work of a step, and the part of each, where it can be told.
_Launched = list[tuple[Work, Part | None]]


def steps(trace: dict[str, Any], reference: Reference) -> list[StepTime]:
    """The steps of a trace, without the first, whose beginning is not in it, and the
    last, whose end may not be.

    A step is what was launched from the range of its preparation on, which the
    launch of a FULL graph follows, up to the next such range.
    """
    events = trace["traceEvents"]
    ranges = _ranges(events)
    forwards = [r.start for r in ranges if r.name == FORWARD]
    preparing = [r.start for r in ranges if r.name == Part.METADATA.range]
    begins = sorted(
        {max((p for p in preparing if p <= at), default=at) for at in forwards}
    )
    launched: list[_Launched] = [[] for _ in begins]
    index = -1
    for at, name, works in _innermost(Launches(events), ranges):
        while index + 1 < len(begins) and begins[index + 1] <= at:
            index += 1
        if index < 0:
            continue
        if name == FORWARD:
            launched[index] += zip(works, reference.parts(works), strict=True)
        else:
            launched[index] += [(work, _part(name)) for work in works]
    found = []
    for before, step in pairwise(launched[:-1]):
        if before and step:
            found.append(_time(step, max(work.end for work, _ in before)))
    return found


def _time(step: _Launched, begin: float) -> StepTime:
    """What ``step`` took from ``begin`` on."""
    total = StepTime()
    by_part: dict[Part, list[Work]] = defaultdict(list)
    end = begin
    for work, known in sorted(step, key=lambda pair: pair[0]):
        part = known or Part.OTHER
        total.untold += known is None
        by_part[part].append(work)
        row = total.parts.setdefault(part, PartTime())
        row.launches += 1
        row.us += work.end - work.start
        row.span_us += max(0.0, work.end - end)
        end = max(end, work.end)
        if part is Part.OTHER:
            launches, us = total.other.get(work.name, (0, 0.0))
            total.other[work.name] = launches + 1, us + work.end - work.start
    for part, works in by_part.items():
        total.parts[part].busy_us = covered(works)
    total.busy_us = covered(work for work, _ in step)
    return total


def mean(times: Sequence[StepTime]) -> StepTime:
    """The mean of the middle half of ``times`` by span, so that a step in which the
    profiler or the machine paused does not count.
    """
    ordered = sorted(times, key=lambda step: step.span_us)
    outside = len(ordered) // 4
    middle = ordered[outside : len(ordered) - outside]
    share = 1 / len(middle)
    total = StepTime()
    for step in middle:
        total.busy_us += step.busy_us * share
        total.untold += step.untold * share
        for part, row in step.parts.items():
            into = total.parts.setdefault(part, PartTime())
            into.launches += row.launches * share
            into.us += row.us * share
            into.busy_us += row.busy_us * share
            into.span_us += row.span_us * share
        for name, (launches, us) in step.other.items():
            count, spent = total.other.get(name, (0.0, 0.0))
            total.other[name] = count + launches * share, spent + us * share
    return total
