"""The report of a trial: as text, as JSON, as Markdown for a pull request.

The JSON, which `--json` prints, has the keys

    from, to        versions
    state           clean, re-anchored, resolved, dropped, obsolete, drift, conflict;
                    or current, without the keys below, where `latest` is the base
    patches         a list: name, subject, state, outcome (the state, drift aside),
                    drop_when, range_diff (null where there is nothing to compare),
                    files (a list: path, outcome, note, hunks)
    own             a list: path, state (unchanged, changed, gone, new), added,
                    removed (lines of upstream's file)
    requirements    added, removed
    drift           a list: level (breaking, changed), symbol, change, used_by
"""

from collections import Counter
from typing import Any

from .carry import Outcome
from .checks import VERSION_FILE
from .drift import Level
from .errors import count
from .trial import OwnState, State, Trial

_OWN = {
    OwnState.UNCHANGED: "upstream's is as it was",
    OwnState.GONE: "upstream has it no more",
    OwnState.NEW: "upstream has a file there now: rename ours before --accept",
}


def facts(trial: Trial) -> dict[str, Any]:
    """The report as JSON has it."""
    return {
        "from": trial.releases.old_version,
        "to": trial.releases.new_version,
        "state": trial.state,
        "patches": [
            {
                "name": it.old.name,
                "subject": it.old.subject,
                "state": trial.state_of(it),
                "outcome": it.outcome,
                "drop_when": it.old.headers.get("Drop-when", ""),
                "range_diff": trial.range_diffs.get(it.old.name),
                "files": [
                    {
                        "path": file.path,
                        "outcome": file.outcome,
                        "note": file.note,
                        "hunks": file.hunks(),
                    }
                    for file in it.files
                ],
            }
            for it in trial.patches
        ],
        "own": [
            {
                "path": it.path,
                "state": it.state,
                "added": it.added,
                "removed": it.removed,
            }
            for it in trial.own
        ],
        "requirements": {"added": trial.needs_added, "removed": trial.needs_removed},
        "drift": [
            {
                "level": it.level,
                "symbol": it.symbol,
                "change": it.change,
                "used_by": list(it.used_by),
            }
            for it in trial.findings
        ],
    }


def words(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    lines = [f"vLLM {report['from']} -> {report['to']}: {report['state']}", ""]
    lines.append(f"patches  {_tally(row['state'] for row in report['patches'])}")
    for row in report["patches"]:
        lines += [f"  {row['name']}: {_state(row)}: {row['subject']}", *_files(row)]
        if row["range_diff"] and row["range_diff"].count("\n") > 1:
            lines += [f"      {line}" for line in row["range_diff"].splitlines()]
        hint = _drop_hint(row, report["to"])
        if hint:
            lines.append(f"    {hint}")
    lines += ["", f"own      {count(len(report['own']), 'file')} in upstream's place"]
    lines += [f"  {row['path']}: {_own(row)}" for row in report["own"]]
    needs = report["requirements"]
    changed = len(needs["added"]) + len(needs["removed"])
    lines += ["", f"needs    {count(changed, 'requirement')} changed"]
    lines += [f"  + {it}" for it in needs["added"]]
    lines += [f"  - {it}" for it in needs["removed"]]
    lines += ["", f"drift    {_tally(row['level'] for row in report['drift'])}"]
    for row in report["drift"]:
        lines.append(f"  {row['level']}: {row['symbol']}: {row['change']}")
        lines += [f"    used by {where}" for where in row["used_by"]]
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    """The report for the body of a pull request."""
    lines = [
        f"## Rebase from vLLM {report['from']} to {report['to']}: {report['state']}",
        "",
        "| patch | state | what it does |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| `{row['name']}` | {_state(row)} | {_cell(row['subject'])} |"
        for row in report["patches"]
    ]
    for title, outcome in (
        ("Conflicts", Outcome.CONFLICT),
        ("Resolved by hand: review these", Outcome.RESOLVED),
        ("Re-anchored only: the edit is the same", Outcome.REANCHORED),
        ("Obsolete: upstream has the edit", Outcome.OBSOLETE),
        ("Left out", Outcome.DROPPED),
    ):
        rows = [row for row in report["patches"] if row["outcome"] == outcome]
        if rows:
            lines += ["", f"### {title}"]
        for row in rows:
            lines += ["", f"`{row['name']}`"]
            lines += [f"- {line.strip()}" for line in _notes(row)]
            hint = _drop_hint(row, report["to"])
            if hint:
                lines.append(f"- {hint}")
            shown = [hunk for file in row["files"] for hunk in file["hunks"]]
            if row["range_diff"]:
                shown.append(row["range_diff"].rstrip("\n"))
            for text in shown:
                lines += ["", *_fenced(text)]
    lines += ["", "### Own files in the place of upstream's", ""]
    lines += [f"- `{row['path']}`: {_own(row)}" for row in report["own"]]
    needs = report["requirements"]
    if needs["added"] or needs["removed"]:
        lines += ["", "### Requirements of the release", ""]
        lines += [f"- new: `{it}`" for it in needs["added"]]
        lines += [f"- gone: `{it}`" for it in needs["removed"]]
    for level in Level:
        rows = [row for row in report["drift"] if row["level"] == level]
        if rows:
            lines += ["", f"### Drift, {level}", "", "| symbol | change | used by |"]
            lines.append("| --- | --- | --- |")
        for row in rows:
            used_by = "<br>".join(f"`{where}`" for where in row["used_by"])
            change = _cell(row["change"])
            lines.append(f"| `{row['symbol']}` | {change} | {used_by} |")
    return "\n".join(lines) + "\n"


def _state(row: dict[str, Any]) -> str:
    if row["state"] == row["outcome"]:
        return str(row["state"])
    return f"{row['state']} ({row['outcome']})"


def _files(row: dict[str, Any]) -> list[str]:
    lines = []
    for file, note in zip(row["files"], _notes(row), strict=True):
        # A patch on one file says it all in its own line, unless there is a note.
        if len(row["files"]) > 1 or file["note"] or file["hunks"]:
            lines.append(f"    {note}")
        for hunk in file["hunks"]:
            lines += [f"      {line}".rstrip() for line in hunk.splitlines()]
    return lines


def _notes(row: dict[str, Any]) -> list[str]:
    return [
        f"{file['path']}: {file['outcome']}"
        + (f" ({file['note']})" if file["note"] else "")
        for file in row["files"]
    ]


def _drop_hint(row: dict[str, Any], version: str) -> str:
    if row["outcome"] == Outcome.OBSOLETE:
        return "upstream has the edit: --accept takes the patch off the series"
    if row["state"] == State.CLEAN or row["outcome"] == Outcome.DROPPED:
        return ""
    drop_when = " ".join(row["drop_when"].split())
    return f"drop it if this passes on vLLM {version} alone: {drop_when}"


def _own(row: dict[str, Any]) -> str:
    if row["path"] == VERSION_FILE and row["state"] != OwnState.NEW:
        return "ours is written by --accept"
    if row["state"] == OwnState.CHANGED:
        lines = f"+{row['added']} -{row['removed']} lines"
        return f"upstream's has changed, {lines}: see what ours needs of it"
    return _OWN[OwnState(row["state"])]


def _tally(states: Any) -> str:
    counts = Counter(states)
    order = [*State, *Level]
    found = sorted(counts, key=order.index)
    return ", ".join(f"{counts[state]} {state}" for state in found) or "none"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _fenced(text: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}diff", text, fence]
