"""The stack as the repository states it: base, own files, patches."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import base as base_module
from . import own, patches
from .base import Base
from .errors import StackError
from .files import read_text
from .patches import Patch

SERIES = "series"


@dataclass(frozen=True)
class Places:
    """Where things lie in a checkout."""

    repo: Path

    @property
    def tree(self) -> Path:
        return self.repo / "vllm"

    @property
    def patches(self) -> Path:
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
    def undo(self) -> Path:
        """Old files of the stack while they are rewritten."""
        return self.repo / ".tree.undo"

    @property
    def lock(self) -> Path:
        return self.repo / ".tree.lock"


@dataclass(frozen=True)
class Stack:
    places: Places
    base: Base
    own: list[str]
    patches: list[Patch]
    raw: dict[str, bytes]
    """Patch files by name, as they are on disk."""

    @cached_property
    def digest(self) -> str:
        """Identity of the stack: pins, own files' paths, series, patches.

        Own files' contents are left out: they are edited in place, which asks
        for no new tree.  `identity` covers them.
        """
        base = self.base
        facts = [
            base.version,
            base.sdist.sha256,
            *(f"{machine} {it.sha256}" for machine, it in sorted(base.wheels.items())),
            *(f"{it.path} {it.sha256}" for it in (*base.replaces, *base.removes)),
            *self.own,
            *(f"{name} {sha256(data)}" for name, data in self.raw.items()),
        ]
        return sha256("\0".join(facts).encode())

    @property
    def touched(self) -> set[str]:
        return {path for patch in self.patches for path in patch.touches}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def series(folder: Path) -> list[str]:
    """File names in `patches/series`; comments and empty lines are skipped."""
    path = folder / SERIES
    if not path.exists():
        return []
    lines = (line.partition("#")[0].strip() for line in read_text(path).splitlines())
    return [line for line in lines if line]


def with_series(text: str, names: list[str], known: Collection[str]) -> str:
    """`patches/series` brought from the patches `known` to `names`; comments stay."""
    gone = set(known) - set(names)
    lines = [
        line for line in text.splitlines() if line.partition("#")[0].strip() not in gone
    ]
    lines += [name for name in names if name not in known]
    return "".join(f"{line}\n" for line in lines)


def load(repo: Path) -> Stack:
    """Read the stack; raises `StackError` if a part is missing or malformed."""
    places = Places(repo)
    if places.scratch.exists() and not places.tree.exists():
        raise StackError("an earlier run was interrupted: run scripts/apply.sh")
    names = series(places.patches)
    numbers = [patches.split_name(name)[0] for name in names]
    if numbers != sorted(set(numbers)):
        raise StackError("patches/series is not in the order of the patch numbers")
    raw = {}
    for name in names:
        try:
            raw[name] = (places.patches / name).read_bytes()
        except FileNotFoundError:
            raise StackError(
                f"patches/{name} is in patches/series but missing: restore it from "
                "git or take it off the series"
            ) from None
    if places.tree.is_symlink():
        raise StackError(f"{places.tree} is a link: make it a folder of this checkout")
    return Stack(
        places,
        base_module.load(repo),
        own.load(places.tree),
        [patches.parse(name, data) for name, data in raw.items()],
        raw,
    )


def write(place: Path, data: bytes) -> None:
    """Write a file of the stack whole or not at all."""
    partial = place.with_name(place.name + ".part")
    try:
        partial.write_bytes(data)
        partial.replace(place)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
