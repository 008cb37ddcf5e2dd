"""How a tree takes another's place, and what is left by a run that was stopped.

A tree is built complete in a scratch folder beside the old one and takes its
place in one rename.  The marker inside it, written last, names the stack and
the commit it was made from; the tree's git directory only ever gains objects
before that rename, so a run that stops at any point leaves the old tree whole.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import StackError
from ..progress import note, step
from ..stack import Places, rewrite
from . import marker as markers
from .history import History


def lay_own(source: Path, target: Path, paths: Iterable[str]) -> None:
    """Put the own files of one tree into another, as the same files.

    Hard links, so that an editor that has one open goes on writing to it.
    """
    for path in paths:
        old, new = source / path, target / path
        new.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        try:
            os.link(old, new)
        except OSError as fault:
            if fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            shutil.copy2(old, new)


def _stamp(path: Path) -> tuple[int, int, int]:
    with suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return -1, -1, -1


def swap(places: Places, new: Path, own: Iterable[str]) -> None:
    """Let the folder `new` take the tree's place; the old one moves into scratch.

    An own file that an editor replaces meanwhile is taken over too.
    """
    laid = {path: _stamp(new / path) for path in own}
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
            for path, stamp in laid.items()
            if _stamp(old / path) != stamp and _stamp(places.tree / path) == stamp
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


def unsettled(places: Places) -> str | None:
    """Return what is going on or was left half way, and what to do; None if nothing."""
    with suppress(FileNotFoundError), places.lock.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "another run is at work on this checkout: wait for it"
    if interrupted(places):
        return "an earlier run was interrupted: run scripts/apply.sh"
    return None


def interrupted(places: Places) -> bool:
    """Whether an earlier run stopped half way (call it without the lock held)."""
    here = places.tree.exists() and not places.scratch.exists()
    return not here or rewrite.pending(places)


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
        if rewrite.pending(places):
            rewrite.restore(places)
        clean(places)
    history = History(places.history)
    if not history.exists():
        return
    locks = (*places.history.glob("*.lock"), *places.history.glob("refs/**/*.lock"))
    for left in locks:
        left.unlink()
    marker = markers.read(places.tree)
    if marker and marker.head != history.head():
        history.settle(places.tree, marker.head, marker.release, marker.base)
