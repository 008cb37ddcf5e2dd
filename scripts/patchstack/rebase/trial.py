"""Trying the stack on another release: the whole verdict, nothing written.

Works on two recorded releases; `carry` moves the series, `drift` compares what
our code takes from upstream, and what gives way to own files is compared here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ..drift import compare
from ..drift.compare import Finding
from ..drift.symbols import Read, SourceTree
from ..drift.uses import Code
from ..files import read_text
from ..progress import note
from ..release.archive import PACKAGE
from ..stack import Stack, version
from ..tree.history import History, PatchFailure
from . import carry
from .carry import Carried, Choices, Outcome, Target


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
    """An upstream file in whose place one of ours lies."""

    path: str
    state: OwnState
    added: int = 0
    """lines that upstream's file gained"""
    removed: int = 0

    @property
    def matters(self) -> bool:
        """Whether somebody has to look; the version is written by `--accept`."""
        return self.state != OwnState.UNCHANGED and self.path != version.FILE


@dataclass(frozen=True)
class Releases:
    """Two recorded releases: version and tree id of each."""

    old_version: str
    old: str
    new_version: str
    new: str


@dataclass(frozen=True)
class Trial:
    """The verdict."""

    releases: Releases
    patches: list[Carried]
    range_diffs: dict[str, str]
    """By patch name, of patches that came over otherwise than clean."""
    own: list[OwnFile]
    needs_added: list[str]
    """Requirements of the release that the old one did not have."""
    needs_removed: list[str]
    findings: list[Finding]

    def state_of(self, carried: Carried) -> State:
        """Return the patch's state; drift counts where its text found a place."""
        placed = (Outcome.CLEAN, Outcome.REANCHORED, Outcome.RESOLVED)
        start = f"patches/{carried.old.name}: "
        drifted = any(
            where.startswith(start) for it in self.findings for where in it.used_by
        )
        if carried.outcome in placed and drifted:
            return State.DRIFT
        return State(carried.outcome.value)

    @property
    def state(self) -> State:
        """The worst that became of anything."""
        states = {self.state_of(it) for it in self.patches}
        needs = self.needs_added or self.needs_removed
        if self.findings or needs or any(it.matters for it in self.own):
            states.add(State.DRIFT)
        return max(states, key=list(State).index, default=State.CLEAN)


def run(stack: Stack, history: History, releases: Releases, choices: Choices) -> Trial:
    """Try the stack on `releases.new`; only objects are added to `history`."""
    commits = _commits(stack, history, releases)
    moved = history.renames(releases.old, releases.new)
    to = Target(
        stack.base, releases.new, releases.new_version, releases.old_version, moved
    )
    carried = carry.carry(history, stack.patches, to, choices)
    range_diffs = {
        it.old.name: history.range_diff(commits[it.old.name], it.commit)
        for it in carried
        if it.commit and it.old.name in commits
        if it.outcome in (Outcome.REANCHORED, Outcome.RESOLVED)
    }
    note("comparing what our code takes from upstream")
    old, new = (_reader(history, tree) for tree in (releases.old, releases.new))
    before, after = _needs(old), _needs(new)
    findings = compare.compare(
        _codes(stack, history, carried), stack.own, SourceTree(old), SourceTree(new)
    )
    return Trial(
        releases,
        carried,
        range_diffs,
        _own_files(stack, history, releases),
        sorted(after - before),
        sorted(before - after),
        findings,
    )


def _commits(stack: Stack, history: History, releases: Releases) -> dict[str, str]:
    """The patches' commits on the old release, by name."""
    try:
        built = history.build(releases.old, stack.base, stack.patches)
    except PatchFailure:
        # The series is carried onto itself because it does not fit.
        if releases.old != releases.new:
            raise
        return {}
    names = [it.name for it in stack.patches]
    return dict(zip(names, built.commits[1:], strict=True))


def _reader(history: History, tree: str) -> Read:
    files = history.files(tree)

    def read(path: str) -> bytes | None:
        return history.blob(files[path][1]) if path in files else None

    return read


def _codes(stack: Stack, history: History, carried: list[Carried]) -> Iterator[Code]:
    """Our Python: own files of the package, and the lines that patches add."""
    for path in stack.own:
        if _is_code(path):
            yield Code(path, read_text(stack.places.tree / path))
    for it in carried:
        for file, result in zip(it.old.files, it.files, strict=True):
            gone = result.outcome in (Outcome.OBSOLETE, Outcome.DROPPED)
            if _is_code(file.path) and not gone and history.known(file.after):
                text = history.blob(file.after).decode()
                yield Code(file.path, text, file.added, it.old.name)


def _is_code(path: str) -> bool:
    return path.startswith(PACKAGE) and path.endswith(".py")


def _own_files(stack: Stack, history: History, releases: Releases) -> list[OwnFile]:
    old, new = (history.files(tree) for tree in (releases.old, releases.new))
    found = []
    for pin in stack.base.replaces:
        if pin.path not in new:
            found.append(OwnFile(pin.path, OwnState.GONE))
        elif old.get(pin.path) == new[pin.path]:
            found.append(OwnFile(pin.path, OwnState.UNCHANGED))
        else:
            before = old[pin.path][1] if pin.path in old else history.store(b"")
            counts = history.count_lines(before, new[pin.path][1])
            found.append(OwnFile(pin.path, OwnState.CHANGED, *counts))
    found += [
        OwnFile(path, OwnState.NEW)
        for path in stack.own
        if path in new and not stack.base.gives_way(path)
    ]
    return found


def _needs(read: Read) -> set[str]:
    """Requirements that a release's metadata states, extras aside."""
    text = (read("PKG-INFO") or b"").decode(errors="replace").partition("\n\n")[0]
    lines = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    return {line for line in lines if "extra ==" not in line}
