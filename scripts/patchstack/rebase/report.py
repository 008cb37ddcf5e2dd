"""The report of a trial, as facts and as Markdown, which reads well in a terminal."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..drift.compare import Finding, Level
from ..errors import count
from ..stack import version
from .carry import Carried, CarriedFile, Outcome
from .trial import OwnFile, OwnState, State, Trial

_OWN = {
    OwnState.UNCHANGED: "upstream's is as it was",
    OwnState.GONE: "upstream has it no more",
    OwnState.NEW: "upstream has a file there now: rename ours before --accept",
}
_GROUPS = (
    (Outcome.CONFLICT, "Conflicts"),
    (Outcome.RESOLVED, "Resolved by hand: review these"),
    (Outcome.REANCHORED, "Re-anchored only: the edit is the same"),
    (Outcome.OBSOLETE, "Obsolete: upstream has the edit"),
    (Outcome.DROPPED, "Left out"),
    (Outcome.CLEAN, "Clean, with drift"),
)


@dataclass(frozen=True)
class FileRow:
    """A patch's edit of a file."""

    path: str
    outcome: Outcome
    note: str
    hunks: list[str]
    """conflicts, from marker to marker"""


@dataclass(frozen=True)
class PatchRow:
    """A patch."""

    name: str
    subject: str
    state: State
    outcome: Outcome
    """the state, drift aside"""
    drop_when: str
    range_diff: str | None
    """null where there is nothing to compare"""
    files: list[FileRow]


@dataclass(frozen=True)
class Requirements:
    """Requirements of the release."""

    added: list[str]
    removed: list[str]


@dataclass(frozen=True)
class Report:
    """What a rebase would come to."""

    from_: str
    """version"""
    to: str
    """version"""
    state: State
    patches: list[PatchRow]
    own: list[OwnFile]
    requirements: Requirements
    drift: list[Finding]


@dataclass(frozen=True)
class Current:
    """`latest` is what the stack is for."""

    from_: str
    to: str
    state: Literal["current"] = "current"


@dataclass(frozen=True)
class Accepted:
    """With --accept."""

    done: list[str]
    """what was written, a line each"""
    state: Literal["accepted"] = "accepted"


@dataclass(frozen=True)
class Aborted:
    """With --abort."""

    state: Literal["aborted"] = "aborted"


def report(trial: Trial) -> Report:
    """Return the facts of a trial."""
    return Report(
        trial.releases.old_version,
        trial.releases.new_version,
        trial.state,
        [_patch_row(trial, it) for it in trial.patches],
        trial.own,
        Requirements(trial.needs_added, trial.needs_removed),
        trial.findings,
    )


def _patch_row(trial: Trial, it: Carried) -> PatchRow:
    return PatchRow(
        it.old.name,
        it.old.subject,
        trial.state_of(it),
        it.outcome,
        it.old.trailers.get("Drop-when", ""),
        trial.range_diffs.get(it.old.name),
        [_file_row(file) for file in it.files],
    )


def _file_row(file: CarriedFile) -> FileRow:
    return FileRow(file.path, file.outcome, file.note, file.hunks())


def markdown(report: Report) -> str:
    """Return the report for people."""
    lines = [f"## vLLM {report.from_} -> {report.to}: {report.state}", ""]
    lines.append(f"Patches: {_tally(row.state for row in report.patches)}")
    lines += [
        "",
        *(f"- `{it.name}`: {_state(it)}: {it.subject}" for it in report.patches),
    ]
    for outcome, title in _GROUPS:
        rows = [row for row in report.patches if row.outcome == outcome]
        if outcome == Outcome.CLEAN:
            rows = [row for row in rows if row.state != State.CLEAN]
        if rows:
            lines += ["", f"### {title}"]
        for row in rows:
            lines += _details(row, report.to)
    lines += ["", "### Own files in the place of upstream's", ""]
    lines += [f"- `{it.path}`: {_own(it)}" for it in report.own]
    needs = report.requirements
    if needs.added or needs.removed:
        changed = count(len(needs.added) + len(needs.removed), "requirement")
        lines += ["", f"### Requirements of the release: {changed} changed", ""]
        lines += [f"- new: `{it}`" for it in needs.added]
        lines += [f"- gone: `{it}`" for it in needs.removed]
    for level in Level:
        found = [it for it in report.drift if it.level == level]
        if found:
            lines += ["", f"### Drift: {len(found)} {level}", ""]
        for it in found:
            lines.append(f"- `{it.symbol}`: {it.change}")
            lines += [f"  - used by `{where}`" for where in it.used_by]
    return "\n".join(lines) + "\n"


def _details(row: PatchRow, to: str) -> list[str]:
    lines = ["", f"`{row.name}`"]
    for file in row.files:
        note = f" ({file.note})" if file.note else ""
        lines.append(f"- {file.path}: {file.outcome}{note}")
    if row.outcome == Outcome.OBSOLETE:
        lines.append("- --accept takes the patch off the series")
    elif row.outcome != Outcome.DROPPED:
        lines.append(f"- drop it if this passes on vLLM {to} alone: "
                     + " ".join(row.drop_when.split()))  # fmt: skip
    shown = [hunk for file in row.files for hunk in file.hunks]
    if row.range_diff:
        shown.append(row.range_diff.rstrip("\n"))
    for text in shown:
        fence = "```"
        while fence in text:
            fence += "`"
        lines += ["", f"{fence}diff", text, fence]
    return lines


def _state(row: PatchRow) -> str:
    same = row.state.value == row.outcome.value
    return row.state if same else f"{row.state} ({row.outcome})"


def _own(it: OwnFile) -> str:
    if it.path == version.FILE and it.state != OwnState.NEW:
        return "ours is written by --accept"
    if it.state == OwnState.CHANGED:
        lines = f"+{it.added} -{it.removed} lines"
        return f"upstream's has changed, {lines}: see what ours needs of it"
    return _OWN[it.state]


def _tally(states: Iterable[State]) -> str:
    counts = Counter(states)
    found = sorted(counts, key=list(State).index)
    return ", ".join(f"{counts[state]} {state}" for state in found) or "none"
