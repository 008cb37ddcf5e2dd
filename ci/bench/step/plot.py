"""Draws ms a step, and host time, against the batch size, from the results alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

from .record import Results, StepRecord, case_of

# Told apart by colour-blind readers, and on light and dark ground.
_COLOURS = ("#999999", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
_BOUND = "#777777"
_WIDTH, _HEIGHT = 4.4, 3.2


class HostTime(NamedTuple):
    """Host us of a step's metadata by batch size, with a line's name."""

    title: str
    stock: dict[int, float]
    in_graph: dict[int, float]


def host_time(path: Path) -> HostTime:
    """Host time of the metadata in results of ``bench.sh metadata``: of upstream's
    builds and of ours in the graph, for the first proxy and query length there.

    Raises OSError, or ValueError where the file holds others.
    """
    try:
        records = json.loads(path.read_text())["records"]
        case = layers, query_len = records[0]["proxy"], records[0]["query_len"]
        # Version 1 says stock for eager.
        stock, in_graph = (
            {
                r["batch"]: r["host_us_p50"]
                for r in records
                if (r["proxy"], r["query_len"]) == case and r["path"] in names
            }
            for names in (("eager", "stock"), ("in_graph",))
        )
        if not stock or not in_graph:
            raise ValueError("nothing to compare")
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has no results of 'bench.sh metadata', eager beside in_graph"
        ) from error
    title = f"metadata on the host, {layers} layers, query length {query_len}"
    return HostTime(title, stock, in_graph)


def draw(results: Results, path: Path, host: HostTime | None = None) -> None:
    """Write the plot to ``path``, in the format that its name says.

    One panel for each proxy and query length, one line for each path, and below
    them the time to read what the step has to; a last one for ``host``.

    Raises ValueError where there is no step to draw.
    """
    if not results.records:
        raise ValueError("there is no step to draw")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_case: dict[str, list[StepRecord]] = {}
    for record in results.records:
        by_case.setdefault(case_of(record).name, []).append(record)
    # The stock decode first, in grey, whichever ran first.
    names = sorted(
        dict.fromkeys(record.path for record in results.records),
        key=lambda name: name != "stock",
    )
    colours = {n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(names)}
    # Text stays text, and the same results give the same file.
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "bench-step",
        "font.size": 9,
    }
    with matplotlib.rc_context(style):
        figure, panels = pyplot.subplots(
            1,
            count := len(by_case) + (host is not None),
            figsize=(_WIDTH * count, _HEIGHT),
            squeeze=False,
            layout="constrained",
        )
        for panel, (name, records) in zip(panels[0], by_case.items(), strict=False):
            _panel(panel, name, records, colours)
        if host is not None:
            _host_panel(panels[0][-1], host)
        path.parent.mkdir(parents=True, exist_ok=True)
        dated = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=dated)
        pyplot.close(figure)


def _panel(
    panel: "matplotlib.axes.Axes",
    name: str,
    records: Sequence[StepRecord],
    colours: dict[str, str],
) -> None:
    batches = sorted({record.batch for record in records})
    ends: list[tuple[float, str, str]] = []
    for path, colour in colours.items():
        line = sorted((r for r in records if r.path == path), key=lambda r: r.batch)
        if not line:
            continue
        at = [batches.index(r.batch) for r in line]
        panel.plot(at, [r.step_ms_p50 for r in line], "o-", color=colour, ms=3)
        ends.append((line[-1].step_ms_p50, path, colour))
    least = [min(r.bound_ms for r in records if r.batch == b) for b in batches]
    panel.fill_between(range(len(batches)), least, color=_BOUND, alpha=0.2, lw=0)
    ends.append((least[-1], "bandwidth bound", _BOUND))
    highest = _label(panel, ends, len(batches) - 1)
    panel.set_ylabel("ms a step")
    panel.set_ylim(0, highest * 1.05)
    _frame(panel, name, batches)


def _host_panel(panel: "matplotlib.axes.Axes", host: HostTime) -> None:
    batches = sorted(host.stock | host.in_graph)
    for name, line, colour in (
        ("stock", host.stock, _COLOURS[0]),
        ("in_graph", host.in_graph, _COLOURS[1]),
    ):
        at = [batches.index(batch) for batch in sorted(line)]
        values = [line[batch] for batch in sorted(line)]
        panel.plot(at, values, "o-", color=colour, ms=3)
        _name(panel, name, (at[-1], values[-1]), colour)
    panel.set_yscale("log")
    panel.set_ylim(1, 10_000)
    panel.set_ylabel("us a step")
    _frame(panel, host.title, batches)


def _frame(panel: "matplotlib.axes.Axes", title: str, batches: Sequence[int]) -> None:
    panel.set_title(title, fontsize="medium", loc="left")
    panel.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    panel.set_xlabel("batch size")
    panel.spines[["top", "right"]].set_visible(False)


def _label(
    panel: "matplotlib.axes.Axes", ends: list[tuple[float, str, str]], right: int
) -> float:
    """Name the lines at their right ends, moved apart where they would overlap; the
    height of the highest name.
    """
    ends.sort()
    highest = ends[-1][0]
    apart = highest / 14
    below = float("-inf")
    for y, name, colour in ends:
        below = max(y, below + apart)
        _name(panel, name, (right, below), colour)
    return below


def _name(
    panel: "matplotlib.axes.Axes", name: str, end: tuple[float, float], colour: str
) -> None:
    panel.annotate(
        name,
        end,
        xytext=(6, 0),
        textcoords="offset points",
        color=colour,
        va="center",
    )
