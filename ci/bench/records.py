"""What the metadata bench measures: a record, its table, and the aims."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

PATHS = ("eager", "ported", "replay", "in_graph")
# The most tokens that a sequence of the model may have, and the aim for what a replay
# runs on the GPU where it may, with requests of some hundred tokens.
LONGEST = 2**20
LONGEST_US = 5.0
# The aim of a replay at batch 1, as a factor below the eager build.
AIM = 20.0
# Aims of the build inside the forward graph.
HOST_US = 10.0
GPU_METADATA_US = 15.0
PLANNERS = 3
# At batch 1 of the proxy whose steps are bound by the host, over eager.
STEP_FACTOR = 1.5
HOST_BOUND_PROXY = 8


@dataclass(frozen=True)
class Record:
    """One path at one batch size of one proxy.

    Attributes:
        max_model_len: Tokens that a sequence may have; those of the run have less.
        path: ``eager`` is the stock decode and ``ported`` replays the recordings
            of upstream's own class with the Hopper builders let in, both before
            upstream's forward graphs; ``replay`` and ``in_graph`` are the fork's
            ways of the name, with its own forward graphs.
        steps: Decode steps behind the host figures.
        host_us_p50, host_us_p99: Host time of a step's ``prepare_attn``, us.
        launch_calls: CUDA calls that put work on the GPU, per build.
        step_launch_calls: The same over the whole step.
        planner_launches: FlashMLA planners that the forward graph of a step
            launches.
        device_us: GPU time in which anything of a build runs, us.
        gpu_metadata_us: From the start of a step's first metadata work on the GPU
            to that of the forward's first own kernel, us, waits for the host
            included. The metadata work is what the build launches, which the
            launch of the forward graph follows; ``in_graph`` it is what the graph
            holds before the kernels with which the graphs of ``replay`` begin,
            by start. None where those are not found or were not measured. Taken
            under the profiler, which slows the host: eager waits longer there.
        step_ms_p50: Time between the builds of neighbouring steps, ms.
        recordings, record_seconds, record_mib: What start-up pays; None for eager.
        commit: What the fork was called, by default the commit of the checkout that
            ran the bench.
        stack: The identity of the vllm that was measured.
    """

    proxy: int
    batch: int
    query_len: int
    max_model_len: int
    path: str
    steps: int
    host_us_p50: float
    host_us_p99: float
    launch_calls: float
    step_launch_calls: float
    planner_launches: float | None
    device_us: float
    gpu_metadata_us: float | None
    step_ms_p50: float
    recordings: int | None
    record_seconds: float | None
    record_mib: float | None
    torch: str
    gpu: str
    commit: str
    stack: str


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of ``values`` do not exceed.

    Raises ValueError where there is none.
    """
    if not values:
        raise ValueError("no steps were measured")
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


_SHOWN = [
    field.name
    for field in fields(Record)
    if field.name not in ("torch", "gpu", "commit", "stack")
]


def table(records: Iterable[Record]) -> str:
    """The records as text, one a line."""
    rows = [_SHOWN]
    for record in records:
        rows.append([_shown(getattr(record, name)) for name in _SHOWN])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def aims(records: Iterable[Record]) -> list[str]:
    """One line for each aim that the records can speak to, met or not."""
    by_case: dict[tuple[int, int, int, int], dict[str, Record]] = {}
    for record in records:
        shape = (record.proxy, record.batch, record.query_len, record.max_model_len)
        by_case.setdefault(shape, {})[record.path] = record
    lines = []
    # Start-up is the same for all batch sizes of an engine.
    seen = set()
    for (proxy, batch, query_len, max_len), paths in sorted(by_case.items()):
        case = (
            f"{proxy} layers, batch {batch}, query length {query_len}, max_model_len "
            f"{max_len}"
        )
        eager, ported = paths.get("eager"), paths.get("ported")
        if (ours := paths.get("replay")) is not None:
            if batch == 1 and eager is not None:
                lines.append(_host_aim(case, ours, eager))
            if max_len == LONGEST:
                lines.append(_at_most(case, ours, "device_us", LONGEST_US, " us"))
            engine = (proxy, query_len, max_len)
            if ported is not None and engine not in seen:
                seen.add(engine)
                lines += _start_up_aims(f"{proxy} layers", ours, ported)
        if (in_graph := paths.get("in_graph")) is not None:
            lines += _in_graph_aims(case, in_graph, eager)
    return lines


def _host_aim(case: str, ours: Record, eager: Record) -> str:
    factor = eager.host_us_p50 / ours.host_us_p50
    return (
        f"{_verdict(factor >= AIM)}: {case}: replay {factor:.1f}x below eager "
        f"(aim {AIM:.0f}x)"
    )


def _start_up_aims(proxy: str, ours: Record, ported: Record) -> list[str]:
    lines = []
    for name, unit in (
        ("recordings", ""),
        ("record_seconds", " s"),
        ("record_mib", " MiB"),
    ):
        mine, theirs = getattr(ours, name), getattr(ported, name)
        lines.append(
            f"{_verdict(mine < theirs)}: {proxy}: {name} {_shown(mine)}{unit}, ported "
            f"{_shown(theirs)}{unit}"
        )
    return lines


def _in_graph_aims(case: str, ours: Record, eager: Record | None) -> list[str]:
    lines = []
    for name, aim, unit in (
        ("host_us_p50", HOST_US, " us"),
        ("gpu_metadata_us", GPU_METADATA_US, " us"),
        ("planner_launches", PLANNERS, ""),
    ):
        if getattr(ours, name) is not None:
            lines.append(_at_most(case, ours, name, aim, unit))
    if eager is not None and (ours.proxy, ours.batch) == (HOST_BOUND_PROXY, 1):
        factor = eager.step_ms_p50 / ours.step_ms_p50
        lines.append(
            f"{_verdict(factor >= STEP_FACTOR)}: {case}: in_graph step {factor:.2f}x "
            f"faster than eager (aim {STEP_FACTOR}x)"
        )
    return lines


def _at_most(case: str, ours: Record, name: str, aim: float, unit: str) -> str:
    value = getattr(ours, name)
    return (
        f"{_verdict(value <= aim)}: {case}: {ours.path} {name} {_shown(value)}{unit} "
        f"(aim {aim:.0f}{unit})"
    )


def _verdict(met: bool) -> str:
    return "met" if met else "not met"
