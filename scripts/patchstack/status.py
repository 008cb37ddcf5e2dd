"""`status`: base, series, edits, own files and drift, in words or as JSON."""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import apply, checks, gitcmd, identity, stack, tree
from .errors import StackError, count, some
from .history import History
from .stack import Stack
from .tree import Marker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the base, the series, local edits, own files and drift."
    parser.add_argument(
        "--check",
        action="store_true",
        help="check every rule of the stack; exit code 1 if one is broken",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="as JSON on stdout (docs/schemas/status.v1.json)",
    )


def run(repo: Path, options: argparse.Namespace) -> int:
    loaded = stack.load(repo)
    if options.check:
        return _check(loaded, options.json)
    facts = collect(loaded)
    print(json.dumps(facts, indent=1) if options.json else _words(facts))
    return 0


def _check(loaded: Stack, as_json: bool) -> int:
    found = checks.faults(loaded, platform.machine())
    if as_json:
        print(json.dumps({"faults": found}, indent=1))
    elif not found:
        print(f"{len(checks.RULES)} rules hold (stack {loaded.digest[:12]})")
    else:
        print("\n".join(found))
        raise StackError(f"{count(len(found), 'fault')}: mend each as its line says")
    return 1 if found else 0


def collect(loaded: Stack) -> dict[str, Any]:
    """Facts on the checkout; the keys are those of `status --json`."""
    places, history = loaded.places, History(loaded.places.history)
    marker = tree.read_marker(places.tree)
    drift = apply.check(loaded, platform.machine())
    edits = tree.Edits()
    applied: set[str] = set()
    if marker and history.exists() and not tree.interrupted(places):
        edits = tree.find_edits(places, history, marker.head, loaded.own)
        applied = history.commits(marker.head)
    return {
        "base": loaded.base.version,
        "stack": loaded.digest,
        "identity": identity.reported(places.tree, marker),
        "version": checks.own_version(places.tree),
        "applied": asdict(marker) if marker else None,
        "patches": _patches(loaded, history, marker, applied),
        "edits": asdict(edits),
        "own": _own(loaded),
        "drift": drift,
    }


def _patches(
    loaded: Stack, history: History, marker: Marker | None, applied: set[str]
) -> list[dict[str, Any]]:
    commits: list[str] = []
    fault = None
    if applied and marker:
        try:
            built = history.build(marker.release, loaded.base, loaded.patches)
            commits = built.commits[1:]
        except StackError as failure:
            fault = str(failure)
    rows = []
    for at, patch in enumerate(loaded.patches):
        if not applied:
            state = "not applied"
        elif fault:
            state = "fails" if f"patches/{patch.name}" in fault else "unknown"
        else:
            state = "applied" if commits[at] in applied else "changed since apply"
        rows.append(
            {
                "name": patch.name,
                "subject": patch.subject,
                "state": state,
                "upstream_status": patch.headers.get("Upstream-status"),
                "touches": patch.touches,
                "quoted": patch.quoted,
                "budget": loaded.base.budget(patch.topic),
            }
        )
    return rows


def _own(loaded: Stack) -> list[dict[str, Any]]:
    tracked = gitcmd.tracked_files(loaded.places.repo)
    changed = gitcmd.changed_files(loaded.places.repo)
    replaced = {pin.path for pin in loaded.base.replaces}
    rows = []
    for path in loaded.own:
        if not (loaded.places.tree / path).is_file():
            state = "missing"
        elif tracked is None:
            state = "no git"
        elif f"vllm/{path}" not in tracked:
            state = "not in git"
        else:
            state = "edited" if f"vllm/{path}" in changed else "clean"
        rows.append({"path": path, "state": state, "replaces": path in replaced})
    return rows


def _words(facts: dict[str, Any]) -> str:
    marker = facts["applied"]
    name = facts["identity"] if marker else facts["stack"][:12]
    lines = [
        f"base     vLLM {facts['base']}, fork {facts['version']}, stack {name}",
        f"tree     applied from the {marker['source']} for {marker['machine']}"
        if marker
        else "tree     not applied",
        f"patches  {len(facts['patches'])}",
    ]
    for row in facts["patches"]:
        lines.append(
            f"  {row['name']}: {row['state']}, upstream {row['upstream_status']}, "
            f"quotes {row['quoted']} of {row['budget']} lines: {row['subject']}"
        )
    own_rows = facts["own"]
    replacing = sum(row["replaces"] for row in own_rows)
    lines.append(f"own      {len(own_rows)} files, {replacing} in place of upstream's")
    for state in ("missing", "not in git", "edited"):
        paths = [row["path"] for row in own_rows if row["state"] == state]
        if paths:
            lines.append(f"  {state}: {some(paths, 8)}")
    for kind, hint in (
        ("modified", "scripts/refresh.sh [TOPIC]"),
        ("deleted", "put back, or [[removes]] in upstream.toml"),
        ("added", "in no patch and ignored by git: scripts/refresh.sh --own PATH"),
        ("binaries", "files of the wheel: scripts/apply.sh --discard-edits"),
    ):
        for path in facts["edits"][kind]:
            lines.append(f"edit     {kind}: vllm/{path} ({hint})")
    lines.append(f"drift    {facts['drift'] or 'none'}")
    return "\n".join(lines)
