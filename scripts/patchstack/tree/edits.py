"""Whose the files of the tree are: what was edited there since apply laid it."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import some
from ..files import file_sha256
from ..git import Git, GitError, names
from ..release.archive import DISPOSABLE, WheelFile
from .history import History
from .marker import MARKER, WHEEL_FILES, read_wheel_files

KEEP_OR_DROP = (
    "keep them with scripts/refresh.sh TOPIC (new files: --own PATH) or drop them "
    "with --discard-edits"
)


@dataclass(frozen=True)
class Edits:
    """Paths in the tree, own files aside, that are not as apply laid them."""

    modified: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    binaries: list[str] = field(default_factory=list)
    """changed or deleted files that came from the wheel"""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return any(vars(self).values())

    def __str__(self) -> str:
        """Say in one line what they are, and where."""
        kinds = (
            ("changed", self.modified),
            ("deleted", self.deleted),
            ("new", self.added),
            ("changed binaries", self.binaries),
        )
        return "; ".join(f"{kind}: {some(paths)}" for kind, paths in kinds if paths)

    def only(self, chosen: set[str]) -> "Edits":
        """Return those of the chosen paths."""
        kinds = vars(self).items()
        return Edits(**{k: [it for it in paths if it in chosen] for k, paths in kinds})


def scan(tree: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the tree's files with their stat, except disposable ones and markers."""
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


def find(tree: Path, history: History, commit: str, own: Iterable[str]) -> Edits:
    """Return how the tree differs from a commit and from the wheel's files it has."""
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


def refresh_index(tree: Path, history: History) -> None:
    """Let the index learn the times of files, so that later looks are quick."""
    # It fails where a file has changed, which is for `find` to say.
    with suppress(GitError):
        Git(history.git_dir, tree).run("update-index", "-q", "--refresh")


def _as_laid(path: Path, found: os.stat_result, laid: WheelFile) -> bool:
    if found.st_size != laid.size:
        return False
    # Only a copy that lost its times is worth hashing.
    return found.st_mtime_ns == laid.mtime_ns or file_sha256(path) == laid.sha256
