"""Making the tree: the base, our own files, the patches, the wheel's files.

All or nothing: a run that fails or stops leaves the old tree as it was.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import StackError, some
from ..git import Git, listed
from ..progress import note
from ..release import fetch, source
from ..release.archive import Wheel
from ..release.source import Source
from ..stack import Stack, own
from ..stack.base import Archive
from . import Tree, edits, identity, marker, place
from .edits import KEEP_OR_DROP
from .history import Built, History
from .marker import Marker

Made = Literal["unchanged", "adopted", "applied"]
Unmade = Literal["unchanged", "unapplied"]


@dataclass(frozen=True)
class Wanted:
    """What the user asks of a tree."""

    machine: str
    source: str | None = None
    """An sdist, a folder or GIT-URL@TAG; the pinned sdist without."""
    wheel: str | None = None
    offline: bool = False
    discard_edits: bool = False


def apply(stack: Stack, wanted: Wanted) -> Made:
    """Bring the tree to the stack."""
    base, tree = stack.base, Tree(stack.places)
    pinned = base.wheel(wanted.machine)
    given = None
    if wanted.source:
        given = source.resolve(wanted.source, base, stack.places, wanted.offline)
    if wanted.wheel:
        _verify_wheel(Path(wanted.wheel), pinned)
    fault = stack.contradiction() or own.missing(tree.folder, stack.own)
    if fault:
        raise StackError(fault)
    if tree.marker and not tree.applied and not wanted.discard_edits:
        restore_history(tree, stack, wanted.offline)
    if tree.applied:
        edits.refresh_index(tree.folder, tree.history)
        as_before = tree.applied.wheel == pinned.sha256
        if as_before and (not given or given.kind == "sdist"):
            if tree.applied.digest == stack.digest and not tree.edits(stack.own):
                tree.follow_own_edits(stack)
                return "unchanged"
            if tree.adopt(stack):
                return "adopted"
    if not wanted.discard_edits:
        _refuse_loss(tree, stack.own)
    given = given or source.resolve(None, base, stack.places, wanted.offline)
    wheel = Path(wanted.wheel) if wanted.wheel else fetch.fetch(pinned, wanted.offline)
    _Making(stack, given, wheel, wanted).run()
    return "applied"


def _verify_wheel(path: Path, pinned: Archive) -> None:
    if not path.is_file():
        raise StackError(f"--wheel {path}: no such file")
    fetch.verify(path, pinned)


def restore_history(tree: Tree, stack: Stack, offline: bool) -> None:
    """Make the history of a tree that has lost it, so that edits show again."""
    note("making .tree.git again")
    scratch = stack.places.scratch
    scratch.mkdir()
    new = History(scratch / "git")
    new.create()
    given = source.resolve(None, stack.base, stack.places, offline)
    given.unpack(scratch / "release")
    paths = [path for path, _ in edits.scan(scratch / "release")]
    release = new.record(scratch / "release", paths, scratch / "index")
    found = tree.marker
    built = new.build(release, stack.base, stack.patches)
    if found is None or built.head != found.head:
        raise StackError(
            "vllm/ was made from another stack than patches/ now holds, and .tree.git "
            "is gone, so its edits cannot be told: check out the patches it was made "
            "from, or drop the edits with scripts/apply.sh --discard-edits"
        )
    new.git_dir.rename(stack.places.history)
    shutil.rmtree(scratch)
    tree.history.settle(tree.folder, found.head, found.release, found.base)


def _refuse_loss(tree: Tree, own_files: Sequence[str]) -> None:
    if tree.applied:
        tree.refuse_edits(own_files)
        return
    foreign = sorted(
        {path for path, _ in edits.scan(tree.folder)}.difference(own_files)
    )
    if foreign:
        raise StackError(
            f"vllm/ holds what apply would lose (new: {some(foreign)}): {KEEP_OR_DROP}"
        )


class _Making:
    """One making of a tree, in the scratch folder beside the old one."""

    def __init__(
        self, stack: Stack, given: Source, wheel: Path, wanted: Wanted
    ) -> None:
        self.stack, self.base, self.places = stack, stack.base, stack.places
        self.given, self.wanted = given, wanted
        self.wheel = Wheel(wheel)
        self.new = self.places.scratch / "tree"
        self.index = self.places.scratch / "index"
        self.history = History(self.places.history)
        self.fresh = not self.history.exists()

    def run(self) -> None:
        self.places.scratch.mkdir()
        self.given.unpack(self.new)
        complete = self.given.kind == "sdist"
        source.verify(self.new, self.base, self.wheel, complete)
        released = [path for path, _ in edits.scan(self.new)]
        self._refuse_unexplained(self.wheel.sha256.keys() | set(released))
        if self.fresh:
            self.history = History(self.places.scratch / "git")
            self.history.create()
        with ThreadPoolExecutor(1) as worker:
            # git works in a process of its own meanwhile.
            recording = worker.submit(self._record, released)
            upstream = set(released)
            note(f"unpacking {self.wheel.path.name}")
            laid = self.wheel.unpack(
                self.new,
                lambda path: path not in upstream and not self.base.gives_way(path),
            )
            release, built = recording.result()
        self._patch(built, released)
        place.lay_own(self.places.tree, self.new, self.stack.own)
        marker.write_wheel_files(self.new, laid)
        made = self._mark(release, built, len(laid))
        if not self.wanted.discard_edits:
            # Again, because the user may have gone on working.
            _refuse_loss(Tree(self.places), self.stack.own)
        if self.fresh:
            self.history.git_dir.rename(self.places.history)
        history = History(self.places.history)
        with place.signals_blocked():
            place.swap(self.places, self.new, self.stack.own)
            self.index.replace(self.places.history / "index")
            history.settle(self.places.tree, made.head, made.release, made.base)

    def _refuse_unexplained(self, upstream: set[str]) -> None:
        """An own file takes an upstream file's place only with a pin and a reason."""
        for path in sorted(upstream.intersection(self.stack.own)):
            if not self.base.gives_way(path):
                raise StackError(
                    f"own file vllm/{path} is an upstream file: say why it takes its "
                    f"place: scripts/refresh.sh --own vllm/{path} --why REASON"
                )

    def _record(self, released: list[str]) -> tuple[str, Built]:
        note(f"recording {len(released)} files of the base")
        release = self.history.record(self.new, released, self.index)
        return release, self.history.build(release, self.base, self.stack.patches)

    def _patch(self, built: Built, released: list[str]) -> None:
        """Bring the laid base to what the patches make of it."""
        for path in filter(self.base.gives_way, released):
            (self.new / path).unlink()
        for pin in self.base.removes:
            if (self.new / pin.path).is_dir():
                shutil.rmtree(self.new / pin.path)
        git = Git(self.history.git_dir, self.new, self.index)
        git.run("read-tree", "--reset", "-i", built.head)
        touched = listed(sorted(self.stack.touched))
        git.run("checkout-index", "-f", "-u", "-z", "--stdin", stdin=touched)

    def _mark(self, release: str, built: Built, wheel_files: int) -> Marker:
        files = identity.files(identity.ours(self.stack), self.new)
        made = Marker(
            base=self.base.version,
            digest=self.stack.digest,
            head=built.head,
            release=release,
            source=self.given.kind,
            machine=self.wanted.machine,
            wheel=self.base.wheel(self.wanted.machine).sha256,
            patches=len(self.stack.patches),
            own=len(self.stack.own),
            base_files=len(self.history.files(built.head)),
            wheel_files=wheel_files,
            identity=identity.name(self.stack.digest, files),
            files=files,
        )
        marker.write(self.new, made)
        return made


def unapply(stack: Stack, discard_edits: bool) -> Unmade:
    """Leave only own files."""
    places, tree = stack.places, Tree(stack.places)
    own_files = set(stack.own)
    foreign = any(path not in own_files for path, _ in edits.scan(places.tree))
    if tree.marker is None and not foreign and not places.history.exists():
        return "unchanged"
    missing = own.missing(tree.folder, stack.own)
    if missing:
        raise StackError(missing)
    if not discard_edits:
        if tree.marker and not tree.applied:
            restore_history(tree, stack, offline=False)
        _refuse_loss(tree, stack.own)
    new = places.scratch / "tree"
    new.mkdir(parents=True)
    place.lay_own(places.tree, new, stack.own)
    place.swap(places, new, stack.own)
    if places.history.exists():
        place.move(places.history, places.scratch / "git")
    return "unapplied"
