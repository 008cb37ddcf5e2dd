"""`apply`: make the tree from the base, our own files and the patches."""

import argparse
import json
import platform
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

from . import fetch, identity, source, stack, tree
from .archive import Wheel
from .base import Archive
from .errors import StackError, count, some
from .gitcmd import Git, listed
from .history import Built, History
from .progress import note
from .source import Source
from .stack import Places, Stack
from .tree import Edits, Marker

KEEP_OR_DROP = (
    "keep them with scripts/refresh.sh TOPIC (new files: --own PATH) or drop them "
    "with --discard-edits"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make vllm/ from the pinned upstream release, our own files and the patches. "
        "All or nothing; a second run changes nothing."
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE|DIR|GIT-URL@TAG",
        help="the base as an sdist, a source folder or a clone (default: the pinned "
        "sdist from the package index, cached)",
    )
    parser.add_argument("--wheel", metavar="FILE", help="the pinned release wheel")
    parser.add_argument(
        "--machine",
        default=platform.machine(),
        help="architecture of the compiled files (default: %(default)s)",
    )
    parser.add_argument("--offline", action="store_true", help="use only the cache")
    parser.add_argument(
        "--discard-edits",
        action="store_true",
        help="drop local edits of upstream's files (never those of own files)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit code 0 if the tree is applied and unedited",
    )
    mode.add_argument(
        "--unapply", action="store_true", help="leave only our own files in vllm/"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="result as JSON on stdout (docs/schemas/apply.v1.json)",
    )


def run(repo: Path, options: argparse.Namespace) -> int:
    if options.check:
        return _check(stack.load(repo), options)
    started = time.monotonic()
    inside = _stands_in(repo / "vllm")
    with tree.locked(Places(repo)):
        # Read under the lock: the run we waited for may have changed it.
        loaded = stack.load(repo)
        try:
            if options.unapply:
                state = unapply(loaded, options.discard_edits)
            else:
                state = apply(loaded, options)
        finally:
            tree.clean(loaded.places)
    _report(loaded, state, time.monotonic() - started, options.json)
    if inside and state in ("applied", "unapplied"):
        note("your shell stands in the folder that was replaced: cd to it again")
    return 0


def _stands_in(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:
        return False


def _check(loaded: Stack, options: argparse.Namespace) -> int:
    fault = check(loaded, options.machine)
    if options.json:
        state = "stale" if fault else "applied"
        print(json.dumps({"state": state, "fault": fault, "digest": loaded.digest}))
    elif fault:
        raise StackError(fault)
    else:
        print(f"vllm/ is applied and unedited (stack {loaded.digest[:12]})")
    return 1 if fault else 0


def check(loaded: Stack, machine: str) -> str | None:
    """Why the tree is not what the stack makes, in a line; None if it is."""
    places, history = loaded.places, History(loaded.places.history)
    marker = tree.read_marker(places.tree)
    if tree.busy(places):
        return "another run is at work on this checkout: wait for it"
    if tree.interrupted(places):
        return "an earlier run was interrupted: run scripts/apply.sh"
    if marker is None:
        return "vllm/ is not applied: run scripts/apply.sh"
    if not history.exists() or history.head() != marker.head:
        return "the tree's history is gone or changed: run scripts/apply.sh"
    edits = tree.find_edits(places, history, marker.head, loaded.own)
    if edits:
        return f"vllm/ has local edits ({tree.describe(edits)}): {KEEP_OR_DROP}"
    if marker.digest != loaded.digest:
        return "vllm/ was made from another stack: run scripts/apply.sh"
    if marker.wheel != loaded.base.wheel(machine).sha256:
        return f"vllm/ is made for {marker.machine}: run scripts/apply.sh"
    return None


def apply(loaded: Stack, options: argparse.Namespace) -> str:
    """Bring the tree to the stack; returns unchanged, adopted or applied."""
    places, history = loaded.places, History(loaded.places.history)
    base, marker = loaded.base, tree.read_marker(loaded.places.tree)
    pinned = base.wheel(options.machine)
    given = options.source and source.resolve(options.source, base, options.offline)
    if options.wheel:
        _verify_wheel(Path(options.wheel), pinned)
    if marker and history.exists():
        tree.refresh_index(places, history)
        edits = tree.find_edits(places, history, marker.head, loaded.own)
        if marker.wheel == pinned.sha256 and (not given or given.kind == "sdist"):
            if not edits and marker.digest == loaded.digest:
                _identify(loaded, marker)
                return "unchanged"
            if adopt(loaded, marker):
                return "adopted"
        if edits and not options.discard_edits:
            raise StackError(
                f"vllm/ has local edits ({tree.describe(edits)}): {KEEP_OR_DROP}"
            )
    wheel = Path(options.wheel) if options.wheel else None
    _make(
        loaded,
        given or source.resolve(None, base, options.offline),
        wheel or fetch.fetch(pinned, base.version, options.offline),
        options.machine,
        options.discard_edits,
    )
    return "applied"


def _verify_wheel(path: Path, pinned: Archive) -> None:
    if not path.is_file():
        raise StackError(f"--wheel {path}: no such file")
    fetch.verify(path, pinned)


def adopt(loaded: Stack, marker: Marker) -> bool:
    """Take the tree as it lies if the changed stack would make just that.

    So it is after a new own file, a reworded patch, or a pulled patch whose edit
    was already made by hand.  Builds commits, touches no file of the tree.
    """
    places, history = loaded.places, History(loaded.places.history)
    if marker.base != loaded.base.version:
        return False
    if any(not (places.tree / path).is_file() for path in loaded.own):
        return False
    _refuse_clashes(loaded)
    built = history.build(marker.release, loaded.base, loaded.patches)
    if tree.find_edits(places, history, built.head, loaded.own):
        return False
    record(loaded, marker, built)
    return True


def record(loaded: Stack, marker: Marker, built: Built) -> None:
    """State in marker and history that the tree now is what `built` says."""
    places, history = loaded.places, History(loaded.places.history)
    files = identity.files(loaded, places.tree)
    marker = replace(
        marker,
        digest=loaded.digest,
        head=built.head,
        patches=len(loaded.patches),
        own=len(loaded.own),
        base_files=len(history.files(built.head)),
        identity=identity.name(loaded.digest, files),
        files=files,
    )
    tree.write_marker(places.tree, marker)
    tree.settle(places, history, marker)


def _identify(loaded: Stack, marker: Marker) -> None:
    """Own files are edited in place: let the marker follow."""
    files = identity.files(loaded, loaded.places.tree)
    if files != marker.files:
        name = identity.name(loaded.digest, files)
        tree.write_marker(
            loaded.places.tree, replace(marker, identity=name, files=files)
        )


def _make(
    loaded: Stack, given: Source, wheel_path: Path, machine: str, discard_edits: bool
) -> None:
    places, base = loaded.places, loaded.base
    _refuse_clashes(loaded)
    places.scratch.mkdir()
    new, index = places.scratch / "tree", places.scratch / "index"
    given.lay(new, base)
    wheel = Wheel(wheel_path)
    if given.kind == "folder":
        source.drop_builds(new, wheel)
    source.verify_against_wheel(new, base, wheel)

    released = [path for path, _ in tree.scan(new)]
    _refuse_unexplained(loaded, wheel.sha256.keys() | set(released))

    history = History(places.history)
    fresh = not history.exists()
    if fresh:
        history = History(places.scratch / "git")
        history.create()
    note(f"recording {len(released)} files of the base")
    release = history.record_release(new, released, index)
    built = history.build(release, base, loaded.patches)
    _lay_patched(history, built, new, index, released, loaded)
    tree.lay_own(places.tree, new, loaded.own)

    note(f"unpacking {wheel_path.name}")
    upstream = set(released)
    laid = wheel.unpack(
        new, lambda path: path not in upstream and not base.gives_way(path)
    )
    tree.write_wheel_files(new, laid)
    files = identity.files(loaded, new)
    marker = Marker(
        base=base.version,
        digest=loaded.digest,
        head=built.head,
        release=release,
        source=given.kind,
        machine=machine,
        wheel=base.wheel(machine).sha256,
        patches=len(loaded.patches),
        own=len(loaded.own),
        base_files=len(history.files(built.head)),
        wheel_files=len(laid),
        identity=identity.name(loaded.digest, files),
        files=files,
    )
    tree.write_marker(new, marker)
    if not discard_edits:
        # Again, because the user may have gone on working.
        _refuse_loss(loaded, new)
    if fresh:
        history.git_dir.rename(places.history)
        history = History(places.history)
    with tree.signals_blocked():
        tree.swap(places, new, loaded.own)
        index.replace(places.history / "index")
        tree.settle(places, history, marker)


def _refuse_loss(loaded: Stack, new: Path) -> None:
    places, history = loaded.places, History(loaded.places.history)
    marker = tree.read_marker(places.tree)
    if marker and history.exists():
        edits = tree.find_edits(places, history, marker.head, loaded.own)
    else:
        edits = tree.compare(places.tree, new, loaded.own)
    if edits:
        raise StackError(
            f"vllm/ holds what apply would lose ({tree.describe(edits)}): "
            f"{KEEP_OR_DROP}"
        )


def _refuse_clashes(loaded: Stack) -> None:
    """An own file and a patch, or an own file and its pin, must not disagree."""
    replaced = {pin.path for pin in loaded.base.replaces}
    orphans = sorted(replaced - set(loaded.own))
    if orphans:
        raise StackError(
            f"upstream.toml lets own files replace {some(orphans)}, but "
            "vllm/.gitignore does not list them: add them with scripts/refresh.sh --own"
        )
    given_way = sorted(path for path in loaded.touched if loaded.base.gives_way(path))
    if given_way:
        raise StackError(
            f"a patch edits {some(given_way)}, which upstream.toml replaces or "
            "removes: edit the own file in place instead"
        )
    unpinned = sorted(loaded.touched.symmetric_difference(loaded.base.touches))
    if unpinned:
        raise StackError(
            f"[touches] in upstream.toml and the patches disagree on {some(unpinned)}: "
            "run scripts/refresh.sh --pins"
        )


def _refuse_unexplained(loaded: Stack, upstream: set[str]) -> None:
    """An own file takes an upstream file's place only with a pin and a reason."""
    clashes = sorted(
        path
        for path in upstream.intersection(loaded.own)
        if not loaded.base.gives_way(path)
    )
    if clashes:
        raise StackError(
            f"own file vllm/{clashes[0]} is an upstream file: say why it takes its "
            f"place: scripts/refresh.sh --own vllm/{clashes[0]} --why REASON"
        )


def _lay_patched(
    history: History,
    built: Built,
    new: Path,
    index: Path,
    released: list[str],
    loaded: Stack,
) -> None:
    for path in released:
        if loaded.base.gives_way(path):
            (new / path).unlink()
    for pin in loaded.base.removes:
        if (new / pin.path).is_dir():
            shutil.rmtree(new / pin.path)
    git = Git(history.git_dir, new, index)
    git.run("read-tree", "--reset", "-i", built.head)
    touched = listed(sorted(loaded.touched))
    git.run("checkout-index", "-f", "-u", "-z", "--stdin", stdin=touched)


def unapply(loaded: Stack, discard_edits: bool) -> str:
    """Leave only own files; returns unchanged or unapplied."""
    places, history = loaded.places, History(loaded.places.history)
    marker = tree.read_marker(places.tree)
    own_files = set(loaded.own)
    foreign = sorted(
        path for path, _ in tree.scan(places.tree) if path not in own_files
    )
    if marker is None and not foreign and not places.history.exists():
        return "unchanged"
    if not discard_edits:
        if marker and history.exists():
            edits = tree.find_edits(places, history, marker.head, loaded.own)
        else:
            edits = Edits(added=foreign)
        if edits:
            raise StackError(
                f"vllm/ has local edits ({tree.describe(edits)}): {KEEP_OR_DROP}"
            )
    new = places.scratch / "tree"
    new.mkdir(parents=True)
    tree.lay_own(places.tree, new, loaded.own)
    tree.swap(places, new, loaded.own)
    if places.history.exists():
        tree.move(places.history, places.scratch / "git")
    return "unapplied"


def _report(loaded: Stack, state: str, seconds: float, as_json: bool) -> None:
    marker = tree.read_marker(loaded.places.tree)
    if as_json:
        facts = asdict(marker) if marker else {}
        print(json.dumps({"state": state, "seconds": round(seconds, 2), **facts}))
        return
    if marker is None:
        print(f"vllm/ holds only our own files ({seconds:.1f} s)")
        return
    done = {
        "applied": "applied",
        "adopted": "already as the new stack makes it",
        "unchanged": "nothing to do",
    }[state]
    print(
        f"vLLM {marker.base} + {count(marker.patches, 'patch')} + "
        f"{count(marker.own, 'own file')}, "
        f"stack {marker.identity}: {done} ({seconds:.1f} s)"
    )
    if state == "applied":
        print(f"  base   {marker.base_files} files from the {marker.source}")
        print(f"  wheel  {marker.wheel_files} files for {marker.machine}")
        print("next: pip install -e vllm")
