"""What the step bench measures: records, their file, and their tables."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .parts import Part
from .trace import StepTime


@dataclass(frozen=True)
class PartRecord:
    """A part of the step: times as in ``trace.PartTime``, us.

    Attributes:
        bytes: What the part has to read (``reads``); None where that is nothing.
        gb_per_s: Those bytes over ``busy_us``.
        copy_percent: That speed, of the bandwidth of a copy.
    """

    part: str
    launches: float
    us: float
    busy_us: float
    span_us: float
    bytes: float | None
    gb_per_s: float | None
    copy_percent: float | None


@dataclass(frozen=True)
class OtherRecord:
    """Launches of one name that are of no part."""

    name: str
    launches: float
    us: float


@dataclass(frozen=True)
class StepRecord:
    """One path at one batch size of one proxy.

    Attributes:
        layers, rank_of, expert_parallel, routed_experts: The proxy.
        path: ``decode_backend``, and after a colon ``metadata_graphs`` where given.
        steps: Decode steps behind the times, of an engine without a profiler.
        step_ms_p50, step_ms_p99, step_ms_mean: From the launch of one step's forward
            graph to that of the next.
        tokens_per_request: Tokens that a step yields of a request, mean. Above query
            length 1 it depends on how many drafts are accepted; with dummy weights
            next to none are.
        tokens_per_s: Of all requests together.
        profiled_steps: Steps behind the figures below, which the profiler slows down
            where they wait for the host.
        context: Tokens of a request before those steps.
        launches: Kernels, copies and fills of a step.
        untold_launches: Of those in the FULL graph, how many are of an unknown part.
        busy_us, span_us: Time in which any ran, and the time of the step.
        bytes: What the step has to read.
        bound_ms: The time to read it at ``copy_gb_per_s``.
        copy_gb_per_s: Of a copy, bytes read and bytes written together.
        commit, stack: As in ``bench.records.Record``.
    """

    layers: int
    rank_of: int
    expert_parallel: bool
    routed_experts: int
    query_len: int
    batch: int
    path: str
    steps: int
    step_ms_p50: float
    step_ms_p99: float
    step_ms_mean: float
    tokens_per_request: float
    tokens_per_s: float
    profiled_steps: int
    context: int
    launches: float
    untold_launches: float
    busy_us: float
    span_us: float
    bytes: float
    bound_ms: float
    copy_gb_per_s: float
    parts: tuple[PartRecord, ...]
    other: tuple[OtherRecord, ...]
    torch: str
    gpu: str
    commit: str
    stack: str


@dataclass(frozen=True)
class LeftOut:
    """Batch sizes of an engine that were asked for and not measured, and why."""

    layers: int
    rank_of: int
    expert_parallel: bool
    query_len: int
    path: str
    batches: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Results:
    """What was measured, and what was asked for and was not."""

    records: tuple[StepRecord, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def as_json(self) -> str:
        """The results as ``docs/schemas/bench-step.v1.json`` says."""
        return json.dumps(asdict(self), indent=1)


def part_records(
    time: StepTime, reads: dict[Part, float], copy_gb_per_s: float
) -> tuple[PartRecord, ...]:
    """The rows of a step, in the order of ``Part``.

    What a part has to read counts for the experts where those launches read it too.
    """
    reads = dict(reads)
    for part in (Part.ROUTER, Part.SHARED_EXPERT):
        if part not in time.parts and Part.EXPERTS in time.parts and part in reads:
            reads[Part.EXPERTS] = reads.get(Part.EXPERTS, 0.0) + reads.pop(part)
    rows = []
    for part in Part:
        if (row := time.parts.get(part)) is None:
            continue
        count = reads.get(part)
        speed = count / row.busy_us / 1e3 if count else None
        percent = 100 * speed / copy_gb_per_s if speed is not None else None
        rows.append(
            PartRecord(
                part=str(part),
                launches=row.launches,
                us=row.us,
                busy_us=row.busy_us,
                span_us=row.span_us,
                bytes=count,
                gb_per_s=speed,
                copy_percent=percent,
            )
        )
    return tuple(rows)


def other_records(time: StepTime) -> tuple[OtherRecord, ...]:
    """What is of no part, the longest first."""
    return tuple(
        OtherRecord(name, launches, us)
        for name, (launches, us) in sorted(time.other.items(), key=lambda i: -i[1][1])
    )


def load(path: Path) -> Results:
    """The results in a file. Raises OSError, or ValueError where it holds others."""
    try:
        return _results(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no results of 'bench.sh step'") from error


def _results(written: dict[str, Any]) -> Results:
    records = []
    for values in written["records"]:
        values["parts"] = tuple(PartRecord(**row) for row in values["parts"])
        values["other"] = tuple(OtherRecord(**row) for row in values["other"])
        records.append(StepRecord(**values))
    left_out = [
        LeftOut(**values | {"batches": tuple(values["batches"])})
        for values in written["left_out"]
    ]
    return Results(tuple(records), tuple(left_out))


def add(path: Path, *more: StepRecord | LeftOut) -> Results:
    """Add to the results in ``path``, made where missing, all or nothing: whoever is
    killed leaves a whole file.
    """
    results = load(path) if path.exists() else Results()
    results = Results(
        results.records + tuple(m for m in more if isinstance(m, StepRecord)),
        results.left_out + tuple(m for m in more if isinstance(m, LeftOut)),
    )
    save(path, results)
    return results


def save(path: Path, results: Results) -> None:
    """Write ``path``, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(results.as_json() + "\n")
    os.replace(unfinished, path)


class Case(NamedTuple):
    """What paths are compared at."""

    layers: int
    rank_of: int
    expert_parallel: bool
    query_len: int

    @property
    def name(self) -> str:
        """The words for it in tables and plots."""
        rank = f", one rank of {self.rank_of}" if self.rank_of > 1 else ""
        by = " with expert parallelism" if self.expert_parallel else ""
        return f"{self.layers} layers{rank}{by}, query length {self.query_len}"


def case_of(record: StepRecord | LeftOut) -> Case:
    """The case that a record is of."""
    return Case(record.layers, record.rank_of, record.expert_parallel, record.query_len)


# In the text; the JSON has all.
NAMES_SHOWN = 3


def table(results: Results) -> str:
    """All steps, one a line; then the parts of each batch size, paths side by side."""
    blocks = []
    by_case: dict[Case, list[StepRecord]] = {}
    for record in results.records:
        by_case.setdefault(case_of(record), []).append(record)
    for case, records in by_case.items():
        blocks.append(f"{case.name}\n{_steps(records)}")
    for case, records in by_case.items():
        for batch in sorted({record.batch for record in records}):
            here = [record for record in records if record.batch == batch]
            blocks.append(f"{case.name}, batch {batch}: us a step\n{_parts(here)}")
    blocks += [
        f"left out: {case_of(left).name}, {left.path}, batch "
        f"{', '.join(map(str, left.batches))}: {left.reason}"
        for left in results.left_out
    ]
    return "\n\n".join(blocks)


def _steps(records: Iterable[StepRecord]) -> str:
    rows = [
        [
            *("batch", "path", "ms p50", "p99", "tokens/s", "launches"),
            *("busy us", "span us", "bound ms", "experts"),
        ]
    ]
    for r in sorted(records, key=lambda r: r.batch):
        rows.append(
            [
                str(r.batch),
                r.path,
                f"{r.step_ms_p50:.2f}",
                f"{r.step_ms_p99:.2f}",
                f"{r.tokens_per_s:.0f}",
                f"{r.launches:.0f}",
                f"{r.busy_us:.0f}",
                f"{r.span_us:.0f}",
                f"{r.bound_ms:.2f}",
                str(r.routed_experts),
            ]
        )
    return _lined_up(rows)


def _parts(records: Sequence[StepRecord]) -> str:
    head = ["", "MB"]
    for record in records:
        head += [record.path, "busy", "n", "% copy"]
    rows = [head]
    found = [{row.part: row for row in record.parts} for record in records]
    for part in Part:
        if not any(part in rows_of for rows_of in found):
            continue
        size = next((r[part].bytes for r in found if part in r), None)
        line = [str(part), _shown(size and size / 1e6, 1)]
        for rows_of in found:
            row = rows_of.get(part)
            if row is None:
                line += ["-"] * 4
                continue
            line += [
                _shown(row.span_us, 1),
                _shown(row.busy_us, 1),
                _shown(row.launches, 0),
                _shown(row.copy_percent, 0),
            ]
        rows.append(line)
    lines = [_lined_up(rows)]
    for record in records:
        if record.untold_launches >= 0.5:
            lines.append(
                f"{record.path}: the part of {record.untold_launches:.0f} launches of "
                "the forward graph cannot be told; they are under other"
            )
        names = [f"{o.name[:32]} {o.us:.1f}" for o in record.other[:NAMES_SHOWN]]
        if len(record.other) > NAMES_SHOWN:
            names.append(f"and {len(record.other) - NAMES_SHOWN} more")
        if names:
            lines.append(f"other, {record.path}: {', '.join(names)}")
    return "\n".join(lines)


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _lined_up(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
