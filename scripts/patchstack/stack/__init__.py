"""The stack as the repository states it: base, own files, patches."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import StackError
from ..files import read_text, sha256
from . import base, own, patch
from .base import Base
from .patch import Patch

SERIES = "series"


@dataclass(frozen=True)
class Places:
    """Where things lie in a checkout."""

    repo: Path

    @property
    def tree(self) -> Path:
        """The source tree that users install."""
        return self.repo / "vllm"

    @property
    def patches(self) -> Path:
        """The patch files and their series."""
        return self.repo / "patches"

    @property
    def history(self) -> Path:
        """The tree's own git directory, outside the tree."""
        return self.repo / ".tree.git"

    @property
    def scratch(self) -> Path:
        """Beside the tree, so that taking its place is one rename."""
        return self.repo / ".tree.new"

    @property
    def rebase(self) -> Path:
        """Work folder of a rebase that is under way."""
        return self.repo / ".rebase"

    @property
    def dropped(self) -> Path:
        """Patches that were taken out, to be had back."""
        return self.repo / ".dropped"

    @property
    def undo(self) -> Path:
        """Old files of the stack while they are rewritten."""
        return self.repo / ".tree.undo"

    @property
    def lock(self) -> Path:
        """Held by the command that changes the checkout."""
        return self.repo / ".tree.lock"


@dataclass(frozen=True)
class Stack:
    """Base, own files and patches of a checkout, as they are on disk."""

    places: Places
    base: Base
    own: list[str]
    patches: list[Patch]

    @cached_property
    def digest(self) -> str:
        """Identity of the stack: pins, own files' paths, series, patches.

        Own files' contents are left out: they are edited in place, which asks
        for no new tree.  `tree.identity` covers them.
        """
        base = self.base
        facts = [
            base.version,
            base.sdist.sha256,
            *(f"{machine} {it.sha256}" for machine, it in sorted(base.wheels.items())),
            *(f"{it.path} {it.sha256}" for it in (*base.replaces, *base.removes)),
            *self.own,
            *(f"{it.name} {sha256(it.data)}" for it in self.patches),
        ]
        return sha256("\0".join(facts).encode())

    @property
    def originals(self) -> dict[str, str]:
        """The upstream files that patches edit, each with its blob id upstream."""
        files = (file for patch in reversed(self.patches) for file in patch.files)
        return {file.path: file.before for file in files}

    @property
    def touched(self) -> set[str]:
        """The upstream files that patches edit."""
        return set(self.originals)

    def find(self, topic: str) -> Patch:
        """Return the patch of a topic or file name; raises `StackError` without."""
        for it in self.patches:
            if topic in (it.topic, it.name):
                return it
        known = ", ".join(it.topic for it in self.patches) or "none"
        raise StackError(f"no patch {topic!r}: there are {known}")

    def contradiction(self) -> str | None:
        """Return where an own file, a patch and a pin disagree, if they do."""
        orphans = sorted({pin.path for pin in self.base.replaces}.difference(self.own))
        if orphans:
            return (
                f"upstream.toml lets own files replace {orphans[0]}, but "
                "vllm/.gitignore does not list it: add it with scripts/refresh.sh --own"
            )
        given_way = sorted(filter(self.base.gives_way, self.touched))
        if given_way:
            return (
                f"a patch edits {given_way[0]}, which upstream.toml replaces or "
                "removes: edit the own file in place instead"
            )
        return None


def series(folder: Path) -> list[str]:
    """Return the file names in `patches/series`, without comments."""
    path = folder / SERIES
    if not path.exists():
        return []
    return list(filter(None, map(_name, read_text(path).splitlines())))


def _name(line: str) -> str:
    return line.partition("#")[0].strip()


def with_series(text: str, names: Collection[str]) -> str:
    """Return the text of `patches/series` for `names`; comments stay in their place.

    New names come last in `names`.
    """
    known = {_name(line): line for line in text.splitlines() if _name(line) in names}
    order = iter(name for name in names if name in known)
    lines = [
        known[next(order)] if _name(line) else line
        for line in text.splitlines()
        if not _name(line) or _name(line) in known
    ]
    lines += [name for name in names if name not in known]
    return "".join(f"{line}\n" for line in lines)


def load(repo: Path) -> Stack:
    """Read the stack; raises `StackError` if a part is missing or malformed."""
    places = Places(repo)
    if places.scratch.exists() and not places.tree.exists():
        raise StackError("an earlier run was interrupted: run scripts/apply.sh")
    if places.tree.is_symlink():
        raise StackError(f"{places.tree} is a link: make it a folder of this checkout")
    names = series(places.patches)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise StackError(f"patches/series names {twice[0]} twice: take one off")
    found = []
    for name in names:
        try:
            data = (places.patches / name).read_bytes()
        except FileNotFoundError:
            raise StackError(
                f"patches/{name} is in patches/series but missing: restore it from "
                "git or take it off the series"
            ) from None
        found.append(patch.parse(name, data))
    return Stack(places, base.load(repo), own.load(places.tree), found)
