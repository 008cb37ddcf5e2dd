"""Launches and GPU time of the metadata builds, read from a profiler trace.

A trace is what ``torch.profiler`` exports: ``{"traceEvents": [...]}`` with times
in us. A build is a CPU range named by ``mark(path)``; the next build's start ends
its step.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

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


def mark(path: str) -> str:
    """The name of the CPU range of a build by ``path``."""
    return _PREFIX + path


@dataclass(frozen=True)
class Cost:
    """Medians over the builds of one path (units as in ``records.Record``)."""

    builds: int
    launch_calls: float
    step_launch_calls: float
    device_us: float


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``spans``."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def costs(trace: dict[str, Any]) -> dict[str, Cost]:
    """What a build costs, by path.

    The last build of a trace has no step; it counts for the rest.
    """
    ranges: list[tuple[float, float, str]] = []
    # One launch may show as a runtime call and the driver call within: they
    # share a correlation id.
    launched: dict[int, float] = {}
    work: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        category, name = event.get("cat"), event.get("name", "")
        if category == "user_annotation" and name.startswith(_PREFIX):
            start = float(event["ts"])
            ranges.append((start, start + event["dur"], name.removeprefix(_PREFIX)))
        elif category in _CALLS and name.startswith(_LAUNCHES):
            correlation, at = event["args"]["correlation"], float(event["ts"])
            launched[correlation] = min(at, launched.get(correlation, at))
        elif category in _WORK:
            start = float(event["ts"])
            work[event["args"]["correlation"]].append((start, start + event["dur"]))
    ranges.sort()
    calls = sorted((at, correlation) for correlation, at in launched.items())
    times = [at for at, _ in calls]

    found: dict[str, list[tuple[int, int | None, float]]] = defaultdict(list)
    for index, (start, end, path) in enumerate(ranges):
        inside = calls[bisect_left(times, start) : bisect_left(times, end)]
        in_step = None
        if index + 1 < len(ranges):
            in_step = bisect_left(times, ranges[index + 1][0]) - bisect_left(
                times, start
            )
        busy = _covered(span for _, correlation in inside for span in work[correlation])
        found[path].append((len(inside), in_step, busy))
    return {
        path: Cost(
            len(builds),
            median(calls_inside for calls_inside, _, _ in builds),
            median(step for _, step, _ in builds if step is not None)
            if any(step is not None for _, step, _ in builds)
            else float("nan"),
            median(busy for _, _, busy in builds),
        )
        for path, builds in found.items()
    }
