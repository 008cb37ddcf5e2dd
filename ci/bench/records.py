"""What the metadata bench measures: a record, its table, and the aims."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

PATHS = ("stock", "ported", "recorded")
# The recorded build's aim at batch 1, as a factor below the stock build.
AIM = 20.0


@dataclass(frozen=True)
class Record:
    """One path at one batch size of one proxy.

    Attributes:
        path: ``stock`` builds eagerly, ``ported`` replays the recordings of
            upstream's own class with the Hopper builders let in, ``recorded``
            replays ours.
        steps: Decode steps behind the host figures.
        host_us_p50, host_us_p99: Host time of a step's metadata build, us.
        launch_calls: CUDA calls that put work on the GPU, per build.
        step_launch_calls: The same over the whole step.
        device_us: GPU time in which anything of a build runs, us.
        step_ms_p50: Time between the builds of neighbouring steps, ms.
        recordings, record_seconds, record_mib: What start-up pays; None for stock.
    """

    proxy: int
    batch: int
    query_len: int
    path: str
    steps: int
    host_us_p50: float
    host_us_p99: float
    launch_calls: float
    step_launch_calls: float
    device_us: float
    step_ms_p50: float
    recordings: int | None
    record_seconds: float | None
    record_mib: float | None
    torch: str
    gpu: str
    commit: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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
    if field.name not in ("query_len", "torch", "gpu", "commit")
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
    by_case: dict[tuple[int, int, int], dict[str, Record]] = {}
    for record in records:
        case = (record.proxy, record.batch, record.query_len)
        by_case.setdefault(case, {})[record.path] = record
    lines = []
    seen = set()
    for (proxy, batch, _), paths in sorted(by_case.items()):
        ours, stock, ported = (
            paths.get(name) for name in ("recorded", "stock", "ported")
        )
        if ours is None:
            continue
        if batch == 1 and stock is not None:
            factor = stock.host_us_p50 / ours.host_us_p50
            lines.append(
                f"{_verdict(factor >= AIM)}: {proxy} layers, batch 1: recorded build "
                f"{factor:.1f}x below stock (aim {AIM:.0f}x)"
            )
        if ported is not None and proxy not in seen:
            seen.add(proxy)
            for name, unit in (
                ("recordings", ""),
                ("record_seconds", " s"),
                ("record_mib", " MiB"),
            ):
                mine, theirs = getattr(ours, name), getattr(ported, name)
                lines.append(
                    f"{_verdict(mine < theirs)}: {proxy} layers: {name} "
                    f"{_shown(mine)}{unit}, ported {_shown(theirs)}{unit}"
                )
    return lines


def _verdict(met: bool) -> str:
    return "met" if met else "not met"
