"""`rebase`: try the stack on another release, and take it there when accepted.

The work folder `.rebase/` holds two recorded releases, the user's choices and
the files in conflict. Every look at it is a new trial from the start, with the
choices made so far: there is no half way state to get wrong.
"""

import argparse
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import (
    apply,
    archive,
    fetch,
    releases,
    report,
    source,
    stack,
    tree,
    trial,
)
from .accept import Acceptance
from .base import path_sha256
from .carry import CONFLICT_MARKS, Choices, Outcome, Resolution
from .errors import StackError, count, some
from .history import History
from .progress import note
from .source import Source
from .stack import Places, Stack, write
from .trial import Releases, State, Trial

EXIT_CODES = {
    State.CLEAN: 0,
    State.REANCHORED: 0,
    State.RESOLVED: 0,
    State.DROPPED: 0,
    State.CONFLICT: 3,
    State.DRIFT: 4,
    State.OBSOLETE: 5,
}
_STATE = "state.json"
_FILES = "files"
_NONE = "no rebase is under way: start one with scripts/rebase.sh VERSION"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = """\
Try the stack on another release. Nothing is written to the stack until --accept.

Each patch is clean, re-anchored (its file has changed, the edit has its place),
in conflict, obsolete (upstream has the edit) or in drift (it fits, but what it
or our own files use of upstream has changed). Conflicts lie in .rebase/files/:
settle them there (or delete a file to leave its edits out), then --continue."""
    parser.epilog = """\
exit codes, the first that holds:
  3  a patch is in conflict
  4  drift, or an own file's upstream text or the requirements have changed
  5  a patch is obsolete
  0  none of these: every patch is clean, re-anchored or resolved; or accepted
  1  an error; 2 wrong usage"""
    parser.add_argument(
        "version", nargs="?", metavar="VERSION", help="a release, or: latest"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE|DIR|GIT-URL@TAG",
        help="the release as an sdist, a source folder or a clone (default: the "
        "sdist from the package index, cached)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="take the conflicts settled in .rebase/files/ and look again",
    )
    mode.add_argument(
        "--accept",
        action="store_true",
        help="rewrite upstream.toml, patches and version, and apply",
    )
    mode.add_argument(
        "--abort", action="store_true", help="forget the rebase; the stack stays"
    )
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="TOPIC|PATH",
        help="leave out a patch, or the edits of one file (may be repeated)",
    )
    parser.add_argument("--offline", action="store_true", help="use only the cache")
    parser.add_argument(
        "--json",
        action="store_true",
        help="report as JSON on stdout (docs/schemas/rebase.v1.json)",
    )
    parser.add_argument(
        "--markdown", metavar="FILE", help="write the report for a pull request too"
    )


def run(repo: Path, options: argparse.Namespace) -> int:
    under_way = options.go_on or options.accept or options.abort
    if bool(options.version) == under_way:
        raise StackError(
            "say what to do: scripts/rebase.sh VERSION, or --continue, --accept or "
            "--abort for the rebase under way"
        )
    if under_way and options.source:
        raise StackError("--from goes with VERSION: it says where the release is")
    places = Places(repo)
    with tree.locked(places):
        if options.abort:
            return _abort(places, options.json)
        loaded = stack.load(repo)
        if options.version == "latest":
            options.version = fetch.newest()
            if options.version == loaded.base.version:
                return _current(loaded, options.json)
        if options.version:
            _Work.start(loaded, options)
        work = _Work.load(loaded)
        work.drop(options.drop)
        if options.go_on:
            work.take()
        tried = work.look()
        if options.markdown:
            write(Path(options.markdown), report.markdown(report.facts(tried)).encode())
        if options.accept:
            return work.accept(tried, options)
    facts = report.facts(tried)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print(report.words(facts))
        print(f"\nnext: {_next(tried)}")
    return EXIT_CODES[tried.state]


def _abort(places: Places, as_json: bool) -> int:
    if not places.rebase.exists():
        raise StackError(_NONE)
    shutil.rmtree(places.rebase)
    print('{"state": "aborted"}' if as_json else "the rebase is forgotten")
    return 0


def _current(loaded: Stack, as_json: bool) -> int:
    version = loaded.base.version
    if as_json:
        print(json.dumps({"from": version, "to": version, "state": "current"}))
    else:
        print(f"vLLM {version}, which the stack is for, is the newest release")
    return 0


def _next(tried: Trial) -> str:
    if tried.state != State.CONFLICT:
        return "scripts/rebase.sh --accept, or --abort"
    missing = [
        file.path
        for it in tried.patches
        for file in it.files
        if file.outcome == Outcome.CONFLICT and file.found is None
    ]
    steps = []
    if any(
        file.outcome == Outcome.CONFLICT and file.found
        for it in tried.patches
        for file in it.files
    ):
        steps.append("settle the files in .rebase/files/")
    if missing:
        steps.append("leave out what has no file (--drop TOPIC|PATH)")
    return f"{' and '.join(steps)}, then scripts/rebase.sh --continue; or --abort"


@dataclass
class _State:
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


class _Work:
    """A rebase under way."""

    def __init__(self, loaded: Stack, state: _State) -> None:
        self.loaded = loaded
        self.state = state
        self.folder = loaded.places.rebase
        self.history = History(self.folder / "git")

    @classmethod
    def start(cls, loaded: Stack, options: argparse.Namespace) -> None:
        folder = loaded.places.rebase
        found = _read_state(folder)
        if found and (found.laid or found.resolutions or found.drops):
            raise StackError(
                f"a rebase onto vLLM {found.version} is under way: --continue, "
                "--accept or --abort it first"
            )
        version = options.version
        if version == loaded.base.version:
            raise StackError(f"the stack is for vLLM {version} already")
        given = _find(version, options)
        if folder.exists():
            shutil.rmtree(folder)
        try:
            folder.mkdir()
            state = _record(loaded, given, version, options.offline)
            _write_state(folder, state)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @classmethod
    def load(cls, loaded: Stack) -> "_Work":
        state = _read_state(loaded.places.rebase)
        if state is None:
            raise StackError(_NONE)
        if state.digest != loaded.digest:
            raise StackError(
                "the stack has changed since the rebase began: --abort it, then "
                f"scripts/rebase.sh {state.version}"
            )
        return cls(loaded, state)

    @property
    def choices(self) -> Choices:
        resolutions = {
            (patch, path): Resolution(ours, result)
            for patch, path, ours, result in self.state.resolutions
        }
        return Choices(resolutions, self.state.drops)

    def drop(self, names: list[str]) -> None:
        known = {patch.topic for patch in self.loaded.patches} | self.loaded.touched
        for name in names:
            if name not in known:
                raise StackError(
                    f"--drop {name}: neither a patch's topic nor a file one edits"
                )
            if name not in self.state.drops:
                self.state.drops.append(name)
        _write_state(self.folder, self.state)

    def take(self) -> None:
        """Take every file that is settled: gone, or without conflict markers."""
        for path, (patch, ours) in list(self.state.laid.items()):
            place = self.folder / _FILES / path
            if place.exists():
                data = place.read_bytes()
                if any(line.startswith(CONFLICT_MARKS) for line in data.split(b"\n")):
                    continue
                result = self.history.store(data)
            else:
                result = ours
            self.state.resolutions.append((patch, path, ours, result))
            del self.state.laid[path]
        _write_state(self.folder, self.state)

    def look(self) -> Trial:
        """Try the stack with the choices so far; lays out what is in conflict."""
        note(f"trying {count(len(self.loaded.patches), 'patch')} on "
             f"vLLM {self.state.version}")  # fmt: skip
        pair = Releases(
            self.loaded.base.version, self.state.old, self.state.version, self.state.new
        )
        tried = trial.run(self.loaded, self.history, pair, self.choices)
        laid = {}
        for it in tried.patches:
            for file in it.files:
                if file.outcome != Outcome.CONFLICT or not file.found:
                    continue
                key = (it.old.name, file.found[1])
                if file.waits_for or file.path in laid:
                    continue
                laid[file.path] = key
                place = self.folder / _FILES / file.path
                if self.state.laid.get(file.path) != key:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(file.conflict)
        for path in (self.folder / _FILES).rglob("*"):
            name = path.relative_to(self.folder / _FILES).as_posix()
            if path.is_file() and name not in laid:
                path.unlink()
        self.state.laid = laid
        _write_state(self.folder, self.state)
        return tried

    def accept(self, tried: Trial, options: argparse.Namespace) -> int:
        state = self.state
        if tried.state == State.CONFLICT:
            names = [it.old.name for it in tried.patches
                     if it.outcome == Outcome.CONFLICT]  # fmt: skip
            raise StackError(f"in conflict: {some(names, 8)}: {_next(tried)}")
        clashes = [it.path for it in tried.own if it.state == trial.OwnState.NEW]
        if clashes:
            raise StackError(
                f"vLLM {state.version} has a file at the place of own file "
                f"vllm/{clashes[0]}: --abort, rename ours, then rebase"
            )
        if state.kind != "sdist":
            raise StackError(
                f"pins need the release's sdist: --abort, then scripts/rebase.sh "
                f"{state.version} (or --from SDIST)"
            )
        self._refuse_edits()
        acceptance = Acceptance(
            self.loaded,
            self.history,
            tried,
            Path(state.place),
            state.pins,
            options.offline,
        )
        done = acceptance.write()
        shutil.rmtree(self.folder)
        if options.json:
            print(json.dumps({"state": "accepted", "done": done}))
        else:
            print("\n".join(done))
            print("next: mend what drifted, scripts/test.sh, commit")
        return 0

    def _refuse_edits(self) -> None:
        places = self.loaded.places
        marker, history = tree.read_marker(places.tree), History(places.history)
        if marker and history.exists():
            edits = tree.find_edits(places, history, marker.head, self.loaded.own)
            if edits:
                raise StackError(
                    f"vllm/ has local edits ({tree.describe(edits)}): "
                    f"{apply.KEEP_OR_DROP}"
                )


def _find(version: str, options: argparse.Namespace) -> Source:
    """The release to try; what it states must be the version that was asked for."""
    if options.source is None:
        return Source("sdist", str(fetch.find_sdist(version, options.offline)))
    given = source.locate(options.source, options.offline)
    if given.kind == "sdist":
        _refuse_other(archive.sdist_version(Path(given.place)), version, options.source)
    return given


def _refuse_other(found: str | None, version: str, where: str) -> None:
    if found not in (None, version):
        raise StackError(f"--from {where} is vLLM {found}, not {version}: name that")


def _record(loaded: Stack, given: Source, version: str, offline: bool) -> _State:
    """Record both releases in the work folder."""
    folder = loaded.places.rebase
    history = History(folder / "git")
    history.create()
    unpacked = releases.unpack(given, history)
    _refuse_other(source.version_of(unpacked), version, given.place)
    pins = {
        pin.path: path_sha256(unpacked, pin.path)
        for pin in (*loaded.base.replaces, *loaded.base.removes)
    }
    new = releases.record(unpacked, version, history)
    old = releases.record_base(loaded, history, offline)
    return _State(version, given.kind, given.place, loaded.digest, old, new, pins)


def _read_state(folder: Path) -> _State | None:
    try:
        state = _State(**json.loads((folder / _STATE).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        # A start that was killed: nothing in the folder is worth anything.
        return None
    state.laid = {path: (it[0], it[1]) for path, it in state.laid.items()}
    return state


def _write_state(folder: Path, state: _State) -> None:
    write(folder / _STATE, (json.dumps(asdict(state), indent=1) + "\n").encode())
