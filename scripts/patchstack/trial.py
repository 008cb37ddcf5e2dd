"""Trying the stack on another release: the whole verdict, nothing written.

Works on two recorded releases; `carry` moves the series, `drift` compares what
our code takes from upstream, and what gives way to own files is compared here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from . import carry, checks, drift
from .archive import PACKAGE
from .carry import Carried, Choices, Outcome
from .drift import Finding
from .files import read_text
from .history import History
from .patches import FileDiff, Patch
from .progress import note
from .stack import Stack
from .symbols import Read, SourceTree
from .uses import Code


class State(StrEnum):
    """What becomes of a patch, or of the whole stack; worst last."""

    CLEAN = "clean"
    REANCHORED = "re-anchored"
    RESOLVED = "resolved"
    DROPPED = "dropped"
    OBSOLETE = "obsolete"
    DRIFT = "drift"
    CONFLICT = "conflict"


class OwnState(StrEnum):
    """What became of the upstream file whose place an own file takes."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    GONE = "gone"
    NEW = "new"
    """Upstream has come to have a file at the path of ours."""


@dataclass(frozen=True)
class OwnFile:
    path: str
    state: OwnState
    added: int = 0
    """Lines that upstream's file has gained."""
    removed: int = 0

    @property
    def matters(self) -> bool:
        """Whether somebody has to look; the version is written by `--accept`."""
        return self.state != OwnState.UNCHANGED and self.path != checks.VERSION_FILE


@dataclass(frozen=True)
class Releases:
    """Two recorded releases: version and tree id of each."""

    old_version: str
    old: str
    new_version: str
    new: str


@dataclass(frozen=True)
class Trial:
    releases: Releases
    patches: list[Carried]
    range_diffs: dict[str, str]
    """By patch name, of patches that came over otherwise than clean."""
    own: list[OwnFile]
    needs_added: list[str]
    """Requirements of the release that the old one did not have."""
    needs_removed: list[str]
    findings: list[Finding]

    def findings_of(self, patch: Patch) -> list[Finding]:
        start = f"patches/{patch.name}: "
        return [
            it
            for it in self.findings
            if any(where.startswith(start) for where in it.used_by)
        ]

    def state_of(self, carried: Carried) -> State:
        """The patch's state; drift counts where its text found a place."""
        placed = (Outcome.CLEAN, Outcome.REANCHORED, Outcome.RESOLVED)
        if carried.outcome in placed and self.findings_of(carried.old):
            return State.DRIFT
        return State(carried.outcome.value)

    @property
    def state(self) -> State:
        states = {self.state_of(it) for it in self.patches}
        if (
            self.findings
            or self.needs_added
            or self.needs_removed
            or any(it.matters for it in self.own)
        ):
            states.add(State.DRIFT)
        return max(states, key=list(State).index, default=State.CLEAN)


def run(loaded: Stack, history: History, releases: Releases, choices: Choices) -> Trial:
    """Try the stack on `releases.new`; only objects are added to `history`."""
    built = history.build(releases.old, loaded.base, loaded.patches)
    carried = carry.carry(
        history,
        built,
        loaded.base,
        loaded.patches,
        releases.new,
        releases.new_version,
        choices,
    )
    range_diffs = {
        it.old.name: history.range_diff(it.old_commit, it.new_commit)
        for it in carried
        if it.new_commit and it.outcome in (Outcome.REANCHORED, Outcome.RESOLVED)
    }
    note("comparing what our code takes from upstream")
    old, new = (_reader(history, tree) for tree in (releases.old, releases.new))
    before, after = _needs(old), _needs(new)
    return Trial(
        releases,
        carried,
        range_diffs,
        _own_files(loaded, history, releases),
        sorted(after - before),
        sorted(before - after),
        drift.compare(
            _codes(loaded, history, carried),
            loaded.own,
            SourceTree(old),
            SourceTree(new),
        ),
    )


def _reader(history: History, tree: str) -> Read:
    files = history.files(tree)

    def read(path: str) -> bytes | None:
        return history.blob(files[path][1]) if path in files else None

    return read


def _codes(loaded: Stack, history: History, carried: list[Carried]) -> Iterator[Code]:
    """Our Python: own files of the package, and the lines that patches add."""
    for path in loaded.own:
        if path.startswith(PACKAGE) and path.endswith(".py"):
            yield Code(path, read_text(loaded.places.tree / path))
    for it in carried:
        left_out = {
            file.path
            for file in it.files
            if file.outcome in (Outcome.OBSOLETE, Outcome.DROPPED)
        }
        for file in it.old.files:
            is_python = file.path.startswith(PACKAGE) and file.path.endswith(".py")
            if is_python and file.path not in left_out:
                text = history.blob(file.after).decode()
                yield Code(file.path, text, _added(file), it.old.name)


def _added(file: FileDiff) -> set[int]:
    """Line numbers, in the edited text, of the lines that the edit adds."""
    added = set()
    for hunk in file.hunks:
        at = hunk.new_start
        for line in hunk.lines:
            if line[:1] == b"+":
                added.add(at)
            at += line[:1] in (b"+", b" ")
    return added


def _own_files(loaded: Stack, history: History, releases: Releases) -> list[OwnFile]:
    old, new = (history.files(tree) for tree in (releases.old, releases.new))
    found = []
    for pin in loaded.base.replaces:
        if pin.path not in new:
            found.append(OwnFile(pin.path, OwnState.GONE))
        elif pin.path in old and old[pin.path][1] == new[pin.path][1]:
            found.append(OwnFile(pin.path, OwnState.UNCHANGED))
        else:
            before = old[pin.path][1] if pin.path in old else history.store(b"")
            counts = history.count_lines(before, new[pin.path][1])
            found.append(OwnFile(pin.path, OwnState.CHANGED, *counts))
    found += [
        OwnFile(path, OwnState.NEW)
        for path in loaded.own
        if path in new and not loaded.base.gives_way(path)
    ]
    return found


def _needs(read: Read) -> set[str]:
    """Requirements that a release's metadata states, extras aside."""
    text = (read("PKG-INFO") or b"").decode(errors="replace").partition("\n\n")[0]
    lines = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    return {line for line in lines if "extra ==" not in line}
