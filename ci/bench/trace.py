"""Launches and GPU time of the metadata builds, read from a profiler trace.

A trace is what ``torch.profiler`` exports: ``{"traceEvents": [...]}`` with times
in us. A build is a CPU range named by ``mark(path)``, the launch of the forward
graph that follows it one named ``FORWARD``; the next build's start ends the step.
GPU work belongs to the range in which it was launched.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

# The calls that put work on the GPU, by the runtime's and the driver's names.
_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchCooperativeKernel",
    "cudaGraphLaunch",
    "cuGraphLaunch",
    "cudaMemcpyAsync",
    "cuMemcpy",
    "cudaMemsetAsync",
    "cuMemset",
)
_CALLS = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_PREFIX = "attention metadata: "
FORWARD = "forward graph"
# FlashMLA's planner, as C++ names it.
_PLANNER = "get_mla_metadata_kernel"
# Work at the head of a forward graph that tells where the forward begins; a
# single piece might be a fill or a copy, as a metadata build has them too.
HEAD = 3


def mark(path: str) -> str:
    """The name of the CPU range of a build by ``path``."""
    return _PREFIX + path


@dataclass(frozen=True)
class Cost:
    """Medians over the steps of one path (units as in ``records.Record``).

    ``head`` names the first work of its forward graphs, metadata included.
    """

    builds: int
    launch_calls: float
    step_launch_calls: float
    device_us: float
    planner_launches: float | None
    gpu_metadata_us: float | None
    head: tuple[str, ...]


class Work(NamedTuple):
    """One kernel, copy or fill on the GPU, with the grid and block of a kernel."""

    start: float
    end: float
    name: str
    shape: tuple[int, ...] = ()


class _Step(NamedTuple):
    """One build, and what followed of its step, where the trace has it."""

    launch_calls: int
    step_launch_calls: int | None
    # By start.
    build: list[Work]
    forward: list[Work]


def covered(works: Iterable[Work]) -> float:
    """Length of the union of the spans of ``works``."""
    total, end = 0.0, float("-inf")
    for work in sorted(works):
        total += max(0.0, work.end - max(work.start, end))
        end = max(end, work.end)
    return total


class Launches:
    """The launches of a trace and the GPU work of each, by time."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        # One launch may show as a runtime call and the driver call within: they
        # share a correlation id.
        launched: dict[int, float] = {}
        self._work: dict[int, list[Work]] = defaultdict(list)
        for event in events:
            category, name = event.get("cat"), event.get("name", "")
            if category in _CALLS and name.startswith(_LAUNCHES):
                correlation, at = event["args"]["correlation"], float(event["ts"])
                launched[correlation] = min(at, launched.get(correlation, at))
            elif category in _WORK:
                start, args = float(event["ts"]), event["args"]
                shape = (*args.get("grid", ()), *args.get("block", ()))
                self._work[args["correlation"]].append(
                    Work(start, start + event["dur"], name, shape)
                )
        self._calls = sorted((at, id_) for id_, at in launched.items())
        self._times = [at for at, _ in self._calls]

    def count(self, start: float, end: float) -> int:
        """How many launches there are from ``start`` to ``end``, in us."""
        return bisect_left(self._times, end) - bisect_left(self._times, start)

    def __iter__(self) -> Iterator[tuple[float, list[Work]]]:
        """The time of each launch, and its work by its own start."""
        return ((at, sorted(self._work[id_])) for at, id_ in self._calls)

    def work(self, start: float, end: float) -> list[Work]:
        """What was launched from ``start`` to ``end``, by its own start."""
        first, last = bisect_left(self._times, start), bisect_left(self._times, end)
        return sorted(
            work for _, id_ in self._calls[first:last] for work in self._work[id_]
        )


def _steps(events: Sequence[dict[str, Any]]) -> dict[str, list[_Step]]:
    """The steps of each path; a trace's last build counts as one without an end."""
    builds: list[tuple[float, float, str]] = []
    forwards: list[tuple[float, float]] = []
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "user_annotation":
            start = float(event["ts"])
            if name.startswith(_PREFIX):
                builds.append((start, start + event["dur"], name.removeprefix(_PREFIX)))
            elif name == FORWARD:
                forwards.append((start, start + event["dur"]))
    builds.sort()
    forwards.sort()
    launches = Launches(events)
    found: dict[str, list[_Step]] = defaultdict(list)
    for index, (start, end, path) in enumerate(builds):
        next_start = builds[index + 1][0] if index + 1 < len(builds) else None
        following = bisect_left(forwards, (end, end))
        forward: list[Work] = []
        if following < len(forwards) and (
            next_start is None or forwards[following][0] < next_start
        ):
            forward = launches.work(*forwards[following])
        found[path].append(
            _Step(
                launches.count(start, end),
                None if next_start is None else launches.count(start, next_start),
                launches.work(start, end),
                forward,
            )
        )
    return found


def _begin(forward: Sequence[Work], head: Sequence[str]) -> int | None:
    """Where in ``forward`` the work named ``head`` stands, or None."""
    names = [work.name for work in forward] if head else []
    for index in range(len(names)):
        if names[index : index + len(head)] == list(head):
            return index
    return None


def _metadata(
    step: _Step, head: Sequence[str] | None
) -> tuple[list[Work], float | None]:
    """The metadata work of a step, and the us until the forward's own work starts.

    That begins with ``head``, or at once without one.
    """
    begin = 0 if head is None else _begin(step.forward, head)
    if begin is None or begin >= len(step.forward):
        return step.build, None
    work = sorted(step.build + list(step.forward[:begin]))
    if not work:
        return work, 0.0
    return work, step.forward[begin].start - work[0].start


def costs(
    trace: dict[str, Any], heads: dict[str, Sequence[str]] | None = None
) -> dict[str, Cost]:
    """What a step costs, by path.

    Args:
        trace: The profiler's.
        heads: For each path whose forward graphs begin with metadata work: the
            ``Cost.head`` of a path whose graphs do not; empty if not known.
    """
    heads = heads or {}
    costs = {}
    for path, steps in _steps(trace["traceEvents"]).items():
        metadata = [_metadata(step, heads.get(path)) for step in steps]
        whole = [s.step_launch_calls for s in steps if s.step_launch_calls is not None]
        forwards = [step.forward for step in steps if step.forward]
        planners = [sum(_PLANNER in w.name for w in work) for work in forwards]
        delays = [us for _, us in metadata if us is not None]
        costs[path] = Cost(
            builds=len(steps),
            launch_calls=median(step.launch_calls for step in steps),
            step_launch_calls=median(whole) if whole else float("nan"),
            device_us=median(covered(work) for work, _ in metadata),
            planner_launches=median(planners) if planners else None,
            gpu_metadata_us=median(delays) if delays else None,
            head=tuple(w.name for w in forwards[0][:HEAD]) if forwards else (),
        )
    return costs
