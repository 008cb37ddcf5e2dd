"""The whole fork as one mailbox, for plain `git am` on a clean base."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import git
from .errors import StackError, some
from .rebase.work import record_base
from .release.archive import PACKAGE
from .stack import Stack, own, version
from .stack.base import Pin
from .stack.patch import Patch
from .tree import Tree
from .tree.history import Entry, History

_PERSON = "patch stack <patchstack@localhost>"
_DATE = "Thu, 01 Jan 2026 00:00:00 +0000"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    mails: int
    base: str
    """version of the upstream release"""


def export(stack: Stack, offline: bool) -> tuple[Exported, bytes]:
    """Return the mailbox: own files first, since patches call them, then patches.

    Raises `StackError` where the tree or own files are not as the stack has them.
    """
    _refuse_edits(stack)
    with tempfile.TemporaryDirectory() as temporary:
        history = History(Path(temporary) / "git")
        history.create()
        release = record_base(stack, history, offline)
        commits = list(_commits(stack, history, release))
        # A mailbox is split with its carriage returns dropped: texts that have them
        # go as binary.
        paths = [path for path, entry in history.files(commits[-1]).items()
                 if path in stack.touched.union(stack.own)
                 and b"\r" in history.blob(entry[1])]  # fmt: skip
        git.set_attributes(history.git_dir, *(f'"{path}" -diff' for path in paths))
        box = history.mail(f"{commits[0]}..{commits[-1]}", "--binary", "--numbered")
    return Exported(len(commits) - 1, stack.base.version), box


def _refuse_edits(stack: Stack) -> None:
    Tree(stack.places).refuse_edits(stack.own)
    missing = own.missing(stack.places.tree, stack.own)
    if missing:
        raise StackError(missing)
    changed = git.changed_files(stack.places.repo)
    edited = [f"vllm/{path}" for path in stack.own if f"vllm/{path}" in changed]
    if edited:
        raise StackError(f"{some(edited)} changed since the last commit: commit first")


def _commits(stack: Stack, history: History, release: str) -> Iterator[str]:
    """The base as a clone has it, packaging, package, patches: a commit each."""
    built = history.build(release, stack.base, stack.patches)
    # What a build makes is in the sdist, but in no git.
    given_way = list(filter(stack.base.gives_way, history.files(release)))
    tree = history.without(release, history.ignored(release, given_way))
    parent = history.commit_base(tree, stack.base.version)
    yield parent
    last = stack.patches[-1] if stack.patches else Patch("", _PERSON, _DATE, "", ())
    for subject, packaging in (
        ("Install the tree of the fork as it lies", True),
        ("Add the own files of the fork", False),
    ):
        blobs = {
            path: _entry(stack, history, path)
            for path in stack.own
            if _packages(path) == packaging
        }
        replaces, removes = (
            [it for it in pins if _packages(it.path) == packaging]
            for pins in (stack.base.replaces, stack.base.removes)
        )
        gone = tuple(it.path for it in removes)
        after = history.without(
            tree,
            [it for it in history.files(tree) if it.startswith(gone)] if gone else [],
        )
        after = history.with_blobs(after, blobs)
        if after != tree:
            reasons = _reasons(subject, blobs, replaces, removes)
            words = Patch("", last.author, last.date, reasons, ())
            parent = history.commit(after, parent, words)
            yield parent
        tree = after
    for patch, commit in zip(stack.patches, built.commits[1:], strict=True):
        files = history.files(commit)
        tree = history.with_blobs(tree, {path: files[path] for path in patch.touches})
        parent = history.commit(tree, parent, patch)
        yield parent


def _packages(path: str) -> bool:
    """Whether a path is about building and installing, not of the package."""
    return not path.startswith(PACKAGE) or path == version.FILE


def _entry(stack: Stack, history: History, path: str) -> Entry:
    place = stack.places.tree / path
    mode = "100755" if place.stat().st_mode & 0o100 else "100644"
    return mode, history.store(place.read_bytes())


def _reasons(
    subject: str,
    blobs: Mapping[str, Entry],
    replaces: Sequence[Pin],
    removes: Sequence[Pin],
) -> str:
    known = {it.path for it in replaces}
    parts = [
        [f"{it.path} takes upstream's place: {it.why}" for it in replaces],
        [f"{it.path} goes: {it.why}" for it in removes],
        [f"{path} is new" for path in blobs if path not in known],
    ]
    body = "\n\n".join("\n".join(lines) for lines in parts if lines)
    return f"{subject}\n\n{body}\n"
