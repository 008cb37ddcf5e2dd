"""Carrying the series from one release to another.  Objects only, no files.

Each file of each patch is merged three ways: the text the patch was made for,
that text with the edit, and the other release's text as the patches before it
leave it.  A conflict does not end the run: the file stays as it was found, and
the patches behind are tried on that, so that one run tells of every patch.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .base import Base
from .history import Built, History
from .patches import FileDiff, Patch

CONFLICT_MARKS = (b"<<<<<<< ", b"||||||| ", b">>>>>>> ")
_HUNK_LINES = 60


class Outcome(StrEnum):
    """How a patch, or its edit of one file, came over; worst last."""

    CLEAN = "clean"
    """It applies as it is: nothing it touches has changed."""
    REANCHORED = "re-anchored"
    """The file has changed, the edit has its place without a doubt."""
    RESOLVED = "resolved"
    """It was in conflict, and somebody settled that by hand."""
    DROPPED = "dropped"
    """It is left out because somebody said so."""
    OBSOLETE = "obsolete"
    """The release has the edit already."""
    CONFLICT = "conflict"


@dataclass(frozen=True)
class Resolution:
    """What a conflict was settled to; good for just the text it was met on."""

    ours: str
    """Blob id of the text that the edit did not fit."""
    result: str
    """Blob id of the text with the edit."""


@dataclass(frozen=True)
class CarriedFile:
    path: str
    outcome: Outcome
    found: tuple[str, str] | None
    """(mode, blob id) in the other release; None if it has no such file."""
    note: str = ""
    conflict: bytes = b""
    """The text with conflict markers."""
    waits_for: str | None = None
    """An earlier patch in conflict over the same file, to be settled first."""

    def hunks(self) -> list[str]:
        """The conflicts, each a text from marker to marker."""
        return conflicts(self.conflict.decode(errors="replace"))


@dataclass(frozen=True)
class Carried:
    """A patch, before and after."""

    old: Patch
    new: Patch | None
    """None where nothing of it is left."""
    files: tuple[CarriedFile, ...]
    old_commit: str
    new_commit: str | None

    @property
    def outcome(self) -> Outcome:
        outcomes = {file.outcome for file in self.files}
        if len(outcomes) == 1:
            return outcomes.pop()
        if Outcome.CONFLICT in outcomes:
            return Outcome.CONFLICT
        # Part of it is gone, which leaves another patch than before.
        gone = {Outcome.OBSOLETE, Outcome.DROPPED}
        if outcomes <= gone:
            return Outcome.OBSOLETE
        ranks = list(Outcome)
        kept = max(outcomes - gone, key=ranks.index)
        if outcomes & gone and kept == Outcome.CLEAN:
            return Outcome.REANCHORED
        return kept


@dataclass(frozen=True)
class Choices:
    """What the user has settled so far."""

    resolutions: Mapping[tuple[str, str], Resolution] = field(default_factory=dict)
    """By patch name and path."""
    drops: Collection[str] = ()
    """Topics, and paths whose edits are left out."""


def carry(
    history: History,
    old: Built,
    base: Base,
    series: Iterable[Patch],
    release: str,
    version: str,
    choices: Choices,
) -> list[Carried]:
    """Bring the series, built as `old` on its `base`, over to a recorded release.

    `release` is the id of the other release's tree, `version` its name.
    """
    tree = history.trim(release, base)
    files = history.files(tree)
    moved = history.renames(history.tree_of(old.commits[0]), tree)
    parent = history.commit_base(tree, version)
    in_conflict: dict[str, str] = {}
    done = []
    for at, patch in enumerate(series):
        results = [
            _carry_file(history, files, patch, file, (base.version, version), choices)
            for file in patch.files
        ]
        changes = {
            carried.path: (carried.found[0], blob)
            for carried, blob in results
            if carried.found and blob != carried.found[1]
        }
        carried_files = tuple(
            _explained(it, version, in_conflict, moved) for it, _ in results
        )
        for it in carried_files:
            if it.outcome == Outcome.CONFLICT:
                in_conflict.setdefault(it.path, patch.name)
        before = tree
        tree = history.with_blobs(tree, changes)
        files |= changes
        new = None
        commit = None
        if changes:
            edits = history.diff(f"patches/{patch.name}", before, tree)
            new = patch.with_files(edits)
            parent = commit = history.commit_patch(tree, parent, new)
        done.append(Carried(patch, new, carried_files, old.commits[at + 1], commit))
    return done


def _carry_file(
    history: History,
    files: Mapping[str, tuple[str, str]],
    patch: Patch,
    file: FileDiff,
    versions: tuple[str, str],
    choices: Choices,
) -> tuple[CarriedFile, str]:
    """How one file comes over, and the blob it is then."""
    found = files.get(file.path)
    blob = found[1] if found else ""

    def outcome(
        kind: Outcome, result: str, conflict: bytes = b""
    ) -> tuple[CarriedFile, str]:
        return CarriedFile(file.path, kind, found, conflict=conflict), result

    if patch.topic in choices.drops or file.path in choices.drops:
        return outcome(Outcome.DROPPED, blob)
    if blob == file.before:
        return outcome(Outcome.CLEAN, file.after)
    if found is None:
        return outcome(Outcome.CONFLICT, blob)
    settled = choices.resolutions.get((patch.name, file.path))
    if settled and settled.ours == blob:
        if settled.result == blob:
            return outcome(Outcome.DROPPED, blob)
        return outcome(Outcome.RESOLVED, settled.result)
    old_version, version = versions
    names = (f"vLLM {version}", f"vLLM {old_version}", f"patches/{patch.name}")
    merged, conflict = history.merge(blob, file.before, file.after, names)
    if conflict:
        return outcome(Outcome.CONFLICT, blob, merged)
    result = history.store(merged)
    # The edit changes nothing there: a surer sign than that it could be taken back,
    # for which the same lines in another function would do.
    if result == blob:
        return outcome(Outcome.OBSOLETE, blob)
    return outcome(Outcome.REANCHORED, result)


def _explained(
    file: CarriedFile,
    version: str,
    in_conflict: Mapping[str, str],
    moved: Mapping[str, str],
) -> CarriedFile:
    waits_for = in_conflict.get(file.path)
    note = ""
    if file.found is None:
        note = f"vLLM {version} has no such file"
        if file.path in moved:
            note += f"; {moved[file.path]} is much like it"
        waits_for = None
    elif waits_for:
        note = f"tried without {waits_for}, which is to be settled first"
    return CarriedFile(
        file.path, file.outcome, file.found, note, file.conflict, waits_for
    )


def conflicts(text: str) -> list[str]:
    """The conflicts in a merged text: what is there, and what the patch changes.

    The patch's side is a diff, so that a long text is not shown twice.
    """
    sides: dict[str, list[str]] = {}
    at = ""
    found = []
    for line in text.splitlines():
        mark = line[:8]
        if mark == "<<<<<<< ":
            sides = {"<": [line], "|": [], "=": []}
            at = "<"
        elif at == "<" and mark == "||||||| ":
            at = "|"
            sides["|"].append(f"{line}, and what the patch changes:")
        elif at == "|" and line == "=======":
            at = "="
        elif at == "=" and mark == ">>>>>>> ":
            before, after = sides["|"][1:], sides["="]
            edit = list(difflib.unified_diff(before, after, n=3, lineterm=""))[2:]
            lines = [*sides["<"], sides["|"][0], *edit, line]
            found.append("\n".join(_shortened(lines)))
            at = ""
        elif at:
            sides[at].append(line)
    return found


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _HUNK_LINES:
        return lines
    half = _HUNK_LINES // 2
    left_out = len(lines) - 2 * half
    return [*lines[:half], f"... {left_out} more lines ...", *lines[-half:]]
