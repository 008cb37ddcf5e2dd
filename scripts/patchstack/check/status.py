"""Facts on a checkout: base, series, edits, own files and drift."""

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from .. import git
from ..errors import StackError, some
from ..stack import Stack, version
from ..tree import Tree, identity, place
from ..tree.edits import Edits
from ..tree.marker import Marker


class PatchState(StrEnum):
    """A patch, beside the tree."""

    NOT_APPLIED = "not applied"
    APPLIED = "applied"
    CHANGED = "changed since apply"
    FAILS = "fails"
    UNKNOWN = "unknown"


class OwnState(StrEnum):
    """An own file, beside the repository."""

    CLEAN = "clean"
    EDITED = "edited"
    MISSING = "missing"
    NOT_IN_GIT = "not in git"
    NO_GIT = "no git"


@dataclass(frozen=True)
class PatchRow:
    """A patch."""

    name: str
    subject: str
    state: PatchState
    upstream_status: str | None
    touches: list[str]
    quoted: int
    """lines of upstream's"""
    budget: int
    """lines it may quote"""


@dataclass(frozen=True)
class OwnRow:
    """An own file."""

    path: str
    state: OwnState
    replaces: bool
    """whether it takes the place of an upstream file"""


@dataclass(frozen=True)
class Status:
    """The state of a checkout."""

    base: str
    """version of the upstream release"""
    stack: str
    """digest of the stack"""
    identity: str
    """what an engine reports"""
    version: str | None
    """of the fork"""
    applied: Marker | None
    patches: list[PatchRow]
    edits: Edits
    own: list[OwnRow]
    drift: str | None
    """why the tree is not what the stack makes"""


def collect(stack: Stack) -> Status:
    """Return the facts; nothing is written, wherever the checkout lies."""
    with Tree(stack.places).history.unchanged() as history:
        tree = Tree(stack.places, history)
        whole = not place.interrupted(stack.places)
        return Status(
            stack.base.version,
            stack.digest,
            identity.reported(tree.folder, tree.marker),
            version.read(tree.folder),
            tree.marker,
            _patches(stack, tree if whole else None),
            tree.edits(stack.own) if whole else Edits(),
            _own(stack),
            tree.fault(stack, platform.machine()),
        )


def _patches(stack: Stack, tree: Tree | None) -> list[PatchRow]:
    return [
        PatchRow(
            patch.name,
            patch.subject,
            state,
            patch.trailers.get("Upstream-status"),
            patch.touches,
            patch.quoted,
            stack.base.budget(patch.topic),
        )
        for patch, state in zip(stack.patches, _states(stack, tree), strict=True)
    ]


def _states(stack: Stack, tree: Tree | None) -> Iterable[PatchState]:
    if tree is None or tree.applied is None:
        return [PatchState.NOT_APPLIED] * len(stack.patches)
    applied = tree.history.commits(tree.applied.head)
    try:
        built = tree.history.build(tree.applied.release, stack.base, stack.patches)
    except StackError as fault:
        return [
            PatchState.FAILS
            if f"patches/{it.name}" in str(fault)
            else PatchState.UNKNOWN
            for it in stack.patches
        ]
    return [
        PatchState.APPLIED if commit in applied else PatchState.CHANGED
        for commit in built.commits[1:]
    ]


def _own(stack: Stack) -> list[OwnRow]:
    tracked = git.tracked_files(stack.places.repo)
    changed = git.changed_files(stack.places.repo)
    replaced = {pin.path for pin in stack.base.replaces}
    rows = []
    for path in stack.own:
        if not (stack.places.tree / path).is_file():
            state = OwnState.MISSING
        elif tracked is None:
            state = OwnState.NO_GIT
        elif f"vllm/{path}" not in tracked:
            state = OwnState.NOT_IN_GIT
        else:
            edited = f"vllm/{path}" in changed
            state = OwnState.EDITED if edited else OwnState.CLEAN
        rows.append(OwnRow(path, state, path in replaced))
    return rows


def words(it: Status) -> str:
    """Return the facts for people."""
    marker = it.applied
    name = it.identity if marker else it.stack[:12]
    lines = [
        f"base     vLLM {it.base}, fork {it.version}, stack {name}",
        f"tree     applied from the {marker.source} for {marker.machine}"
        if marker
        else "tree     not applied",
        f"patches  {len(it.patches)}",
    ]
    for row in it.patches:
        lines.append(
            f"  {row.name}: {row.state}, upstream {row.upstream_status}, "
            f"quotes {row.quoted} of {row.budget} lines: {row.subject}"
        )
    replacing = sum(row.replaces for row in it.own)
    lines.append(f"own      {len(it.own)} files, {replacing} in place of upstream's")
    for state in (OwnState.MISSING, OwnState.NOT_IN_GIT, OwnState.EDITED):
        paths = [row.path for row in it.own if row.state == state]
        if paths:
            lines.append(f"  {state}: {some(paths, 8)}")
    for kind, hint in (
        ("modified", "scripts/refresh.sh [TOPIC]"),
        ("deleted", "put back, or [[removes]] in upstream.toml"),
        ("added", "in no patch and ignored by git: scripts/refresh.sh --own PATH"),
        ("binaries", "files of the wheel: scripts/apply.sh --discard-edits"),
    ):
        for path in vars(it.edits)[kind]:
            lines.append(f"edit     {kind}: vllm/{path} ({hint})")
    lines.append(f"drift    {it.drift or 'none'}")
    return "\n".join(lines)
