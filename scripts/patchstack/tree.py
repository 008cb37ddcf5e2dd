"""The tree `vllm/`: what lies in it, whose edits they are, how it is replaced.

A tree is built complete in a scratch folder beside the old one and takes its
place in one rename.  The marker inside it, written last, names the stack and
the commit it was made from; the tree's git directory only ever gains objects
before that rename, so a run that stops at any point leaves the old tree whole.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import undo
from .archive import WheelFile
from .base import file_sha256
from .errors import StackError, some
from .gitcmd import Git, GitError, names
from .history import History
from .progress import note, step
from .stack import Places

MARKER = ".stack.json"
WHEEL_FILES = ".stack.wheel.json"
WHEEL_SOURCE = "wheel"
"""What the marker of a wheel of the fork names as its source."""

DISPOSABLE = (
    "__pycache__",
    "*.pyc",
    "*.egg-info",
    ".pytest_cache",
    ".ruff_cache",
    ".mypy_cache",
    ".triton",
)
"""Names of what running and installing the tree leaves behind."""


@dataclass(frozen=True)
class Marker:
    """What a tree was made from; lies in the tree as `.stack.json`."""

    base: str
    digest: str
    head: str
    release: str
    source: str
    machine: str
    wheel: str
    """sha256 of the release wheel."""
    patches: int
    own: int
    base_files: int
    wheel_files: int
    identity: str = ""
    """What a running engine says of itself; see `identity.name`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> sha256 of our files in the package, as they were applied."""


def read_marker(tree: Path) -> Marker | None:
    """The tree's marker; None if the tree is not applied."""
    try:
        return Marker(**json.loads((tree / MARKER).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_marker(tree: Path, marker: Marker) -> None:
    place = tree / MARKER
    partial = place.with_name(MARKER + ".part")
    partial.write_text(json.dumps(asdict(marker), indent=1) + "\n")
    partial.replace(place)


def read_wheel_files(tree: Path) -> dict[str, WheelFile]:
    """The files that only the wheel has, as apply laid them."""
    try:
        listed = json.loads((tree / WHEEL_FILES).read_text())
        return {path: WheelFile(*facts) for path, facts in listed.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def write_wheel_files(tree: Path, files: Mapping[str, WheelFile]) -> None:
    listed = {
        path: (it.size, it.mtime_ns, it.sha256) for path, it in sorted(files.items())
    }
    (tree / WHEEL_FILES).write_text(json.dumps(listed, indent=0) + "\n")


@dataclass(frozen=True)
class Edits:
    """Paths in the tree, own files aside, that are not as apply laid them."""

    modified: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    binaries: list[str] = field(default_factory=list)
    """Changed or deleted files that came from the wheel."""

    def __bool__(self) -> bool:
        return any((self.modified, self.deleted, self.added, self.binaries))

    def all(self) -> list[str]:
        return [*self.modified, *self.deleted, *self.added, *self.binaries]


def scan(tree: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Files of the tree with their stat, except disposable ones and markers."""
    folders = [("", str(tree))]
    while folders:
        prefix, folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if _disposable(entry.name):
                    continue
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append((path + "/", entry.path))
                elif path not in (MARKER, WHEEL_FILES):
                    yield path, entry.stat(follow_symlinks=False)


def _disposable(name: str) -> bool:
    # The plain names are by far the most frequent: no pattern for them.
    return name in DISPOSABLE or name.endswith((".pyc", ".egg-info"))


def find_edits(
    places: Places, history: History, commit: str, own: Iterable[str]
) -> Edits:
    """How the tree differs from a commit and from the wheel's files it has."""
    tree = places.tree
    wheel = read_wheel_files(tree)
    present = dict(scan(tree))
    with tempfile.TemporaryDirectory() as temporary:
        index = Path(temporary) / "index"
        # The real index knows which files are untouched; what was staged in it
        # by hand is of no interest.
        with suppress(FileNotFoundError):
            shutil.copy2(history.git_dir / "index", index)
        git = Git(history.git_dir, tree, index)
        git.run("read-tree", "--reset", "-i", commit)
        tracked = set(names(git.run("ls-files", "-z")))
        status = git.run("status", "--porcelain=v1", "-z", "--untracked-files=no")
    # Two letters (index, work tree), a blank, the path.
    changed = {it[3:]: it[1] for it in names(status) if it[1] != " "}
    known = tracked.union(wheel, own)
    return Edits(
        modified=sorted(path for path, how in changed.items() if how != "D"),
        deleted=sorted(path for path, how in changed.items() if how == "D"),
        added=sorted(path for path in present if path not in known),
        binaries=sorted(
            path
            for path, laid in wheel.items()
            if path not in present or not _as_laid(tree / path, present[path], laid)
        ),
    )


def refresh_index(places: Places, history: History) -> None:
    """Let the index learn the times of files, so that later looks are quick."""
    # It fails where a file has changed, which is for find_edits to say.
    with suppress(GitError):
        Git(history.git_dir, places.tree).run("update-index", "-q", "--refresh")


def _as_laid(path: Path, found: os.stat_result, laid: WheelFile) -> bool:
    if found.st_size != laid.size:
        return False
    # Only a copy that lost its times is worth hashing.
    return found.st_mtime_ns == laid.mtime_ns or file_sha256(path) == laid.sha256


def compare(old: Path, new: Path, own: Iterable[str]) -> Edits:
    """What of the tree `old` would be lost if `new` took its place."""
    keep = set(own)
    before = {path for path, _ in scan(old)} - keep
    after = {path for path, _ in scan(new)}
    modified = [path for path in before & after if not _same(old / path, new / path)]
    return Edits(modified=sorted(modified), added=sorted(before - after))


def _same(a: Path, b: Path) -> bool:
    if a.is_symlink() or b.is_symlink():
        return a.is_symlink() and b.is_symlink() and a.readlink() == b.readlink()
    if (a.stat().st_mode ^ b.stat().st_mode) & 0o100:
        return False
    return a.stat().st_size == b.stat().st_size and file_sha256(a) == file_sha256(b)


def lay_own(source: Path, target: Path, own: Iterable[str]) -> None:
    """Put the own files of one tree into another, as the same files.

    Hard links, so that an editor that has one open goes on writing to it.
    """
    for path in own:
        old, new = source / path, target / path
        if old.is_symlink() or not old.is_file():
            raise StackError(
                f"own file vllm/{path} is missing: restore it from git, or take it "
                f"off the list: scripts/refresh.sh --disown vllm/{path}"
            )
        new.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        try:
            os.link(old, new)
        except OSError as fault:
            if fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            shutil.copy2(old, new)


def _identity(path: Path) -> tuple[int, int, int]:
    with suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return -1, -1, -1


def swap(places: Places, new: Path, own: Iterable[str]) -> None:
    """Let the folder `new` take the tree's place; the old one moves into scratch.

    An own file that an editor replaces meanwhile is taken over too.
    """
    own = list(own)
    laid = {path: _identity(new / path) for path in own}
    old = places.scratch / "old"
    with signals_blocked():
        try:
            exchanged = _exchange(new, places.tree)
        except OSError as fault:
            if fault.errno == errno.EBUSY:
                raise StackError(
                    f"{places.tree} is a mount point: mount its parent folder instead"
                ) from None
            raise
        if exchanged:
            new.rename(old)
        else:
            move(places.tree, old)
            new.rename(places.tree)
        stale = [
            path
            for path in own
            if _identity(old / path) != laid[path]
            and _identity(places.tree / path) == laid[path]
        ]
        lay_own(old, places.tree, stale)


def move(folder: Path, to: Path) -> None:
    """Move a folder within a file system; `to` appears whole or not at all."""
    try:
        folder.rename(to)
    except OSError as fault:
        if fault.errno != errno.EXDEV:
            raise
        # An overlay, as in a container's image, renames no folder of a lower layer.
        partial = to.with_name(to.name + ".part")
        shutil.copytree(folder, partial, symlinks=True)
        partial.rename(to)
        shutil.rmtree(folder)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders atomically; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd, exchange = -100, 2
    if renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(b))


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Put off an interrupt until files that belong together are written."""
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def locked(places: Places) -> Iterator[None]:
    """One command at a time changes the tree; a second one waits and says so."""
    with places.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            note(f"waiting for another run on this checkout (process {holder})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        repair(places)
        yield


def busy(places: Places) -> bool:
    """Whether a command is changing the tree just now."""
    try:
        with places.lock.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def interrupted(places: Places) -> bool:
    """Whether an earlier run stopped half way (call it without the lock held)."""
    return places.scratch.exists() or not places.tree.exists() or undo.pending(places)


def clean(places: Places) -> None:
    """Remove scratch files; a tree that was moved away comes back first."""
    old = places.scratch / "old"
    swapped = places.tree.exists() and not (places.scratch / "tree").exists()
    if old.is_dir() and not swapped:
        if places.tree.exists():
            shutil.rmtree(places.tree)
        old.rename(places.tree)
    if places.scratch.exists():
        step("removing scratch files")
        shutil.rmtree(places.scratch)


def repair(places: Places) -> None:
    """Clean up after a run that was killed; needs the lock."""
    if interrupted(places):
        note("cleaning up after an interrupted run")
        if undo.pending(places):
            undo.restore(places)
        clean(places)
    history = History(places.history)
    if not history.exists():
        return
    for left in (
        *places.history.glob("*.lock"),
        *places.history.glob("refs/**/*.lock"),
    ):
        left.unlink()
    marker = read_marker(places.tree)
    if marker and marker.head != history.head():
        settle(places, history, marker)


def settle(places: Places, history: History, marker: Marker) -> None:
    """Bring the history's branch and index to the commit of the marker."""
    # --reset keeps what the index knows of files that stay the same.
    Git(history.git_dir, places.tree).run("read-tree", "--reset", "-i", marker.head)
    history.set_release(marker.release, marker.base)
    history.set_head(marker.head)


def describe(edits: Edits) -> str:
    """One line on the edits: what they are, and where."""
    kinds = (
        ("changed", edits.modified),
        ("deleted", edits.deleted),
        ("new", edits.added),
        ("changed binaries", edits.binaries),
    )
    return "; ".join(f"{kind}: {some(paths)}" for kind, paths in kinds if paths)
