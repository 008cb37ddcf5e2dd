"""A rebase under way.

The work folder `.rebase/` holds two recorded releases, the user's choices and
the files in conflict. Every look at it is a new trial from the start, with the
choices made so far: there is no half way state to get wrong.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import StackError, count, some
from ..files import path_sha256, write
from ..progress import note
from ..release import archive, fetch, source
from ..release.source import Source
from ..stack import Places, Stack
from ..tree import Tree, edits
from ..tree.history import History
from . import trial
from .carry import CONFLICT_MARKS, Choices, Outcome, Resolution
from .trial import OwnState, Releases, State, Trial

_STATE = "state.json"
_FILES = "files"
_NONE = "no rebase is under way: start one with scripts/rebase.sh VERSION"


@dataclass
class Status:
    """What `.rebase/state.json` holds."""

    version: str
    kind: str
    """sdist, folder or clone."""
    place: str
    digest: str
    """Of the stack that is tried."""
    old: str
    """Tree id of the release the stack is for; `new` of the one it is tried on."""
    new: str
    pins: dict[str, str | None]
    """sha256, in the new release, of what gives way to us."""
    drops: list[str] = field(default_factory=list)
    resolutions: list[tuple[str, str, str, str]] = field(default_factory=list)
    """(patch, path, blob it was met on, blob it was settled to)."""
    laid: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Path below `files/` -> (patch, blob it was met on)."""


class Work:
    """The work folder of a rebase."""

    def __init__(self, stack: Stack, status: Status) -> None:
        """Go on with a rebase of the stack."""
        self.stack = stack
        self.status = status
        self.folder = stack.places.rebase
        self.history = History(self.folder / "git")

    @classmethod
    def start(
        cls, stack: Stack, version: str, wanted: str | None, offline: bool
    ) -> None:
        """Record both releases in a new work folder."""
        folder = stack.places.rebase
        found = _read(folder)
        if found and (found.laid or found.resolutions or found.drops):
            raise StackError(
                f"a rebase onto vLLM {found.version} is under way: --continue, "
                "--accept or --abort it first"
            )
        given = _find(stack, version, wanted, offline)
        if folder.exists():
            shutil.rmtree(folder)
        try:
            folder.mkdir()
            _write(folder, _record(stack, given, version, offline))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @classmethod
    def load(cls, stack: Stack) -> "Work":
        """Read the work folder; raises `StackError` if it is of another stack."""
        status = _read(stack.places.rebase)
        if status is None:
            raise StackError(_NONE)
        if status.digest != stack.digest:
            raise StackError(
                "the stack has changed since the rebase began: --abort it, then "
                f"scripts/rebase.sh {status.version}"
            )
        return cls(stack, status)

    def drop(self, names: Sequence[str]) -> None:
        """Leave out patches, or the edits of some files."""
        known = {patch.topic for patch in self.stack.patches} | self.stack.touched
        for name in names:
            if name not in known:
                raise StackError(
                    f"--drop {name}: neither a patch's topic nor a file one edits"
                )
            if name not in self.status.drops:
                self.status.drops.append(name)
        _write(self.folder, self.status)

    def take(self) -> None:
        """Take every file that is settled: gone, or without conflict markers."""
        left = []
        for path, (patch, ours) in list(self.status.laid.items()):
            place = self.folder / _FILES / path
            if place.exists():
                data = place.read_bytes()
                if any(line.startswith(CONFLICT_MARKS) for line in data.split(b"\n")):
                    left.append(path)
                    continue
                result = self.history.store(data)
            else:
                result = ours
            self.status.resolutions.append((patch, path, ours, result))
            del self.status.laid[path]
        if left:
            files = count(len(left), "file")
            note(f"{files} with conflict markers left in .rebase/files/: {some(left)}")
        _write(self.folder, self.status)

    def look(self) -> Trial:
        """Try the stack with the choices so far; lays out what is in conflict."""
        status, base = self.status, self.stack.base
        patches = count(len(self.stack.patches), "patch")
        note(f"trying {patches} on vLLM {status.version}")
        pair = Releases(base.version, status.old, status.version, status.new)
        resolutions = {
            (patch, path): Resolution(ours, result)
            for patch, path, ours, result in status.resolutions
        }
        choices = Choices(resolutions, status.drops)
        tried = trial.run(self.stack, self.history, pair, choices)
        self._lay(tried)
        return tried

    def _lay(self, tried: Trial) -> None:
        laid = {}
        for it in tried.patches:
            for file in it.files:
                waits = file.waits_for or file.path in laid
                if file.outcome != Outcome.CONFLICT or not file.found or waits:
                    continue
                laid[file.path] = key = (it.old.name, file.found[1])
                if self.status.laid.get(file.path) != key:
                    place = self.folder / _FILES / file.path
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(file.conflict)
        for path in (self.folder / _FILES).rglob("*"):
            name = path.relative_to(self.folder / _FILES).as_posix()
            if path.is_file() and name not in laid:
                path.unlink()
        self.status.laid = laid
        _write(self.folder, self.status)

    def refuse_unready(self, tried: Trial) -> None:
        """Raise `StackError` for a trial that cannot be accepted."""
        if tried.state == State.CONFLICT:
            names = [
                it.old.name for it in tried.patches if it.outcome == Outcome.CONFLICT
            ]
            raise StackError(f"in conflict: {some(names, 8)}: {next_step(tried)}")
        clashes = [it.path for it in tried.own if it.state == OwnState.NEW]
        if clashes:
            raise StackError(
                f"vLLM {self.status.version} has a file at the place of own file "
                f"vllm/{clashes[0]}: --abort, rename ours, then rebase"
            )
        if self.status.kind in ("folder", "clone"):
            raise StackError(
                "pins need the release's sdist: --abort, then scripts/rebase.sh "
                f"{self.status.version} (or --from SDIST)"
            )
        Tree(self.stack.places).refuse_edits(self.stack.own)


def abort(places: Places) -> None:
    """Forget the rebase under way."""
    if not places.rebase.exists():
        raise StackError(_NONE)
    shutil.rmtree(places.rebase)


def next_step(tried: Trial) -> str:
    """Return what the user is to do about a trial."""
    if tried.state != State.CONFLICT:
        return "scripts/rebase.sh --accept, or --abort"
    found = {
        file.found is not None
        for it in tried.patches
        for file in it.files
        if file.outcome == Outcome.CONFLICT
    }
    steps = []
    if True in found:
        steps.append("settle the files in .rebase/files/")
    if False in found:
        steps.append("leave out what has no file (--drop TOPIC|PATH)")
    return f"{' and '.join(steps)}, then scripts/rebase.sh --continue; or --abort"


def _find(stack: Stack, version: str, wanted: str | None, offline: bool) -> Source:
    """The release to try; what it states must be the version that was asked for."""
    if wanted is None:
        if version == stack.base.version:
            return source.resolve(None, stack.base, stack.places, offline)
        return Source("sdist", str(fetch.find_sdist(version, offline)))
    given = source.locate(wanted, stack.places, offline)
    if given.kind == "sdist":
        _refuse_other(archive.sdist_version(Path(given.place)), version, wanted)
    return given


def _refuse_other(found: str | None, version: str, where: str) -> None:
    if found not in (None, version):
        raise StackError(f"--from {where} is vLLM {found}, not {version}: name that")


def _record(stack: Stack, given: Source, version: str, offline: bool) -> Status:
    history = History(stack.places.rebase / "git")
    history.create()
    pins: dict[str, str | None] = {
        pin.path: pin.sha256 for pin in (*stack.base.replaces, *stack.base.removes)
    }
    old = new = record_base(stack, history, offline)
    if version != stack.base.version:
        unpacked = _unpack(given, history)
        _refuse_other(source.version_of(unpacked), version, given.place)
        pins = {path: path_sha256(unpacked, path) for path in pins}
        new = _record_release(unpacked, version, history)
    return Status(version, given.kind, given.place, stack.digest, old, new, pins)


def record_base(stack: Stack, history: History, offline: bool) -> str:
    """Return the tree id, in `history`, of the release that the stack is for.

    Taken from the applied tree's history where there is one, else from the sdist.
    """
    tree = Tree(stack.places)
    if tree.applied and tree.applied.base == stack.base.version:
        history.adopt(tree.history)
        return tree.applied.release
    given = source.resolve(None, stack.base, stack.places, offline)
    return _record_release(_unpack(given, history), stack.base.version, history)


def _unpack(given: Source, history: History) -> Path:
    folder = history.git_dir.with_name("release")
    given.unpack(folder)
    return folder


def _record_release(unpacked: Path, version: str, history: History) -> str:
    """Tree id of an unpacked release; its folder is removed."""
    note(f"recording vLLM {version}")
    paths = [path for path, _ in edits.scan(unpacked)]
    index = unpacked.with_name("release.index")
    recorded = history.record(unpacked, paths, index)
    shutil.rmtree(unpacked)
    index.unlink()
    return recorded


def _read(folder: Path) -> Status | None:
    try:
        status = Status(**json.loads((folder / _STATE).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        # A start that was killed: nothing in the folder is worth anything.
        return None
    status.laid = {path: (it[0], it[1]) for path, it in status.laid.items()}
    return status


def _write(folder: Path, status: Status) -> None:
    write(folder / _STATE, (json.dumps(asdict(status), indent=1) + "\n").encode())
