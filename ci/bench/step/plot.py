"""Draws ms a step against the batch size, from the results alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from .record import Results, StepRecord, case_of

# Told apart by colour-blind readers, and on light and dark ground.
_COLOURS = ("#999999", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
_BOUND = "#777777"
_WIDTH, _HEIGHT = 4.4, 3.2


def draw(results: Results, path: Path) -> None:
    """Write the plot to ``path``, in the format that its name says.

    One panel for each proxy and query length, one line for each path, and below
    them the time to read what the step has to.

    Raises ValueError where there is no step to draw.
    """
    if not results.records:
        raise ValueError("there is no step to draw")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_case: dict[str, list[StepRecord]] = {}
    for record in results.records:
        by_case.setdefault(case_of(record).name, []).append(record)
    names = list(dict.fromkeys(record.path for record in results.records))
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
            len(by_case),
            figsize=(_WIDTH * len(by_case), _HEIGHT),
            squeeze=False,
            layout="constrained",
        )
        for panel, (name, records) in zip(panels[0], by_case.items(), strict=True):
            _panel(panel, name, records, colours)
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
    panel.set_title(name, fontsize="medium", loc="left")
    panel.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    panel.set_xlabel("batch size")
    panel.set_ylabel("ms a step")
    panel.set_ylim(0, highest * 1.05)
    panel.spines[["top", "right"]].set_visible(False)


def _label(
    panel: "matplotlib.axes.Axes", ends: list[tuple[float, str, str]], right: int
) -> float:
    """Name the lines at their right ends, moved apart where they would overlap; the
    height of the highest name."""
    ends.sort()
    highest = ends[-1][0]
    apart = highest / 14
    below = float("-inf")
    for y, name, colour in ends:
        below = max(y, below + apart)
        panel.annotate(
            name,
            (right, below),
            xytext=(6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )
    return below
