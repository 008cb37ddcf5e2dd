"""Carrying the series from one base to another, or to another order of its own.

Each file of each patch is merged three ways: the text the patch was made for,
that text with the edit, and the other text as the patches before it leave it.  A
conflict does not end the run: the file stays as it was found, and the patches behind
are tried on that, so that one run tells of every patch.  Objects only, no files.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..stack.base import Base
from ..stack.patch import FileDiff, Patch
from ..tree.history import Entry, History

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
    """A patch's edit of one file, on the other base."""

    path: str
    outcome: Outcome
    found: Entry | None
    """What the edit was met on; None if the other base has no such file."""
    result: str = ""
    """Blob id of the text that comes of it."""
    note: str = ""
    conflict: bytes = b""
    """The text with conflict markers."""
    waits_for: str | None = None
    """An earlier patch in conflict over the same file, to be settled first."""

    def hunks(self) -> list[str]:
        """Return the conflicts, each a text from marker to marker."""
        return conflicts(self.conflict.decode(errors="replace"))


@dataclass(frozen=True)
class Carried:
    """A patch, before and after."""

    old: Patch
    new: Patch | None
    """None where nothing of it is left."""
    files: tuple[CarriedFile, ...]
    commit: str | None
    """Of `new`."""

    @property
    def outcome(self) -> Outcome:
        """What came of the whole patch."""
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


@dataclass(frozen=True)
class Target:
    """Where the series is carried to: a recorded release, and what to call texts."""

    base: Base
    release: str
    """Tree id."""
    version: str
    old_version: str
    moved: Mapping[str, str] = field(default_factory=dict)
    """Files that it has no more -> those of its files that are much like them."""


def carry(
    history: History, series: Iterable[Patch], to: Target, choices: Choices
) -> list[Carried]:
    """Bring the patches over, each onto those before it."""
    tree = history.trim(to.release, to.base)
    files = history.files(tree)
    parent = history.commit_base(tree, to.version)
    in_conflict: dict[str, str] = {}
    done = []
    for patch in series:
        edit = _Carrier(history, files, patch, to, choices)
        carried = tuple(
            _waiting(edit.carry(file), in_conflict.get(file.path))
            for file in patch.files
        )
        for it in carried:
            if it.outcome == Outcome.CONFLICT:
                in_conflict.setdefault(it.path, patch.name)
        changes = {
            it.path: (it.found[0], it.result)
            for it in carried
            if it.found and it.result != it.found[1]
        }
        new, commit = None, None
        if changes:
            tree = history.with_blobs(tree, changes)
            files |= changes
            commit, new = history.seal(patch, tree, parent)
            parent = commit
        done.append(Carried(patch, new, carried, commit))
    return done


class _Carrier:
    """Carries one patch's files to where the patches before it have left them."""

    def __init__(
        self,
        history: History,
        files: Mapping[str, Entry],
        patch: Patch,
        to: Target,
        choices: Choices,
    ) -> None:
        self.history, self.files, self.patch = history, files, patch
        self.to, self.choices = to, choices

    def carry(self, file: FileDiff) -> CarriedFile:
        found = self.files.get(file.path)
        blob = found[1] if found else ""
        settled = self._chosen(file.path, blob)
        if settled is not None:
            outcome = Outcome.DROPPED if settled == blob else Outcome.RESOLVED
            return CarriedFile(file.path, outcome, found, settled)
        if found is None:
            note = f"vLLM {self.to.version} has no such file"
            if file.path in self.to.moved:
                note += f"; {self.to.moved[file.path]} is much like it"
            outcome = Outcome.CONFLICT
            return CarriedFile(file.path, outcome, found, note=note)
        result, conflict = self._merge(file, blob)
        if conflict:
            outcome = Outcome.CONFLICT
        elif result == blob:
            # The edit changes nothing there: a surer sign than that it could be taken
            # back, for which the same lines in another function would do.
            outcome = Outcome.OBSOLETE
        elif (blob, result) == (file.before, file.after):
            outcome = Outcome.CLEAN
        else:
            outcome = Outcome.REANCHORED
        return CarriedFile(file.path, outcome, found, result, conflict=conflict)

    def _chosen(self, path: str, blob: str) -> str | None:
        if self.patch.topic in self.choices.drops or path in self.choices.drops:
            return blob
        settled = self.choices.resolutions.get((self.patch.name, path))
        return settled.result if settled and settled.ours == blob else None

    def _merge(self, file: FileDiff, blob: str) -> tuple[str, bytes]:
        """The text with the edit, and with markers what is in conflict."""
        history = self.history
        before = history.known(file.before)
        # What the hunks make of it, whatever the index line says: it may be edited.
        after = before and history.edited(before, file)
        if before and after:
            if before == blob:
                return after, b""
            labels = (
                f"vLLM {self.to.version}",
                f"vLLM {self.to.old_version}",
                f"patches/{self.patch.name}",
            )
            merged, conflict = history.merge((blob, before, after), labels)
            if conflict:
                return blob, merged
            return history.store(merged), b""
        # Made for a text that is nowhere, as after a merge of two branches.
        result = history.edited(blob, file)
        if result:
            return result, b""
        return blob, _stuck(history.blob(blob), file, self.patch.name)


def _stuck(text: bytes, file: FileDiff, name: str) -> bytes:
    """A text, and behind it the hunks that found no place there."""
    marks = f"<<<<<<< end of the file\n||||||| \n=======\n{{}}>>>>>>> patches/{name}\n"
    head, _, tail = marks.partition("{}")
    return text + head.encode() + file.hunks + tail.encode()


def _waiting(file: CarriedFile, waits_for: str | None) -> CarriedFile:
    if waits_for is None or file.found is None:
        return file
    note = f"tried without {waits_for}, which is to be settled first"
    return replace(file, note=note, waits_for=waits_for)


def conflicts(text: str) -> list[str]:
    """Return the conflicts in a merged text: what is there, what the patch changes.

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
