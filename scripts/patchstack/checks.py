"""What must hold of a stack: the rules that `status --check` and CI enforce."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from . import apply, gitcmd, own, patches, tree
from .base import DEFAULT_BUDGET, file_sha256
from .files import read_text
from .history import History
from .stack import SERIES, Stack, sha256

VERSION_FILE = "vllm/_version.py"
# The text of the licence is its own author's, in every project that takes it.
_COMMON_TEXTS = ("LICENSE",)


def faults(loaded: Stack, machine: str) -> list[str]:
    """Every rule that is broken, a line each, with what to do about it."""
    return [fault for rule in RULES for fault in rule(loaded, machine)]


def _applied(loaded: Stack, machine: str) -> Iterator[str]:
    fault = apply.check(loaded, machine)
    if fault:
        yield fault


def _format(loaded: Stack, _machine: str) -> Iterator[str]:
    for patch in loaded.patches:
        budget = loaded.base.budget(patch.topic)
        yield from patches.lint(patch, loaded.raw[patch.name], budget)


def _budgets(loaded: Stack, _machine: str) -> Iterator[str]:
    topics = {patch.topic for patch in loaded.patches}
    for topic, budget in loaded.base.budgets.items():
        if topic not in topics:
            yield f"upstream.toml: [[budget]] for {topic!r}, which is no patch: drop it"
        elif budget.lines <= DEFAULT_BUDGET or not budget.why.strip():
            yield (
                f"upstream.toml: the [[budget]] of {topic!r} needs more than "
                f"{DEFAULT_BUDGET} lines and a why"
            )


def _series(loaded: Stack, _machine: str) -> Iterator[str]:
    known = {SERIES, *loaded.raw}
    if loaded.places.patches.is_dir():
        for path in sorted(loaded.places.patches.iterdir()):
            if path.name not in known:
                yield f"patches/{path.name} is not in patches/series: add or delete it"


def _pins(loaded: Stack, _machine: str) -> Iterator[str]:
    unpinned = loaded.touched.symmetric_difference(loaded.base.touches)
    for path in sorted(unpinned):
        yield (
            f"upstream.toml: [touches] and the patches disagree on {path}: run "
            "scripts/refresh.sh --pins"
        )
    pins = (*loaded.base.replaces, *loaded.base.removes)
    for pin in pins:
        if not pin.why.strip():
            yield f"upstream.toml: {pin.path} gives way without a why: state it"
    for pin in loaded.base.replaces:
        if pin.path not in loaded.own:
            yield f"upstream.toml: no own file takes the place of {pin.path}: drop it"


def _release(loaded: Stack, _machine: str) -> Iterator[str]:
    """Pins against the recorded release, and our files against its content."""
    history = History(loaded.places.history)
    marker = tree.read_marker(loaded.places.tree)
    if marker is None or not history.exists():
        return
    released = history.files(marker.release)
    for path, digest in loaded.base.touches.items():
        if path in released and sha256(history.blob(released[path][1])) != digest:
            yield (
                f"upstream.toml: [touches] has another sha256 of {path} than the "
                "release: run scripts/refresh.sh --pins"
            )
    blobs = {blob: path for path, (_, blob) in released.items()}
    binaries = {
        it.sha256: path
        for path, it in tree.read_wheel_files(loaded.places.tree).items()
        if it.size
    }
    for path, blob in (gitcmd.tracked_files(loaded.places.repo) or {}).items():
        place = loaded.places.repo / path
        size = place.stat().st_size if place.is_file() else 0
        if place.name in _COMMON_TEXTS or not size:
            continue
        twin = blobs.get(blob) or binaries.get(file_sha256(place))
        if twin:
            yield f"{path} is upstream's {twin}: take it out of git"


def _alone(loaded: Stack, _machine: str) -> Iterator[str]:
    history = History(loaded.places.history)
    marker = tree.read_marker(loaded.places.tree)
    if marker is None or not history.exists():
        return
    base = history.trim(marker.release, loaded.base)
    for patch in loaded.patches:
        if not history.applies_alone(base, patch):
            yield (
                f"patches/{patch.name} does not apply to the base alone: fold it into "
                "the patch it builds on"
            )


def _own_files(loaded: Stack, _machine: str) -> Iterator[str]:
    manifest = loaded.places.tree / own.MANIFEST
    if manifest.read_text() != own.render(loaded.own):
        yield "vllm/.gitignore is not as scripts/refresh.sh --own writes it: use that"
    for path in loaded.own:
        if not (loaded.places.tree / path).is_file():
            yield f"own file vllm/{path} is missing: restore it, or --disown it"
    tracked = gitcmd.tracked_files(loaded.places.repo)
    if tracked is None:
        return
    inside = {
        path.removeprefix("vllm/") for path in tracked if path.startswith("vllm/")
    }
    for path in sorted(inside - set(loaded.own)):
        yield (
            f"vllm/{path} is in git but no own file: scripts/refresh.sh --own "
            f"vllm/{path}, or git rm it"
        )
    for path in sorted(set(loaded.own) - inside):
        yield f"own file vllm/{path} is not in git: git add vllm/{path}"


def _version(loaded: Stack, _machine: str) -> Iterator[str]:
    version = own_version(loaded.places.tree)
    release, _, local = (version or "").partition("+")
    if version is None or release != loaded.base.version or not local:
        yield (
            f"vllm/{VERSION_FILE} says {version}: make it {loaded.base.version}+LOCAL"
        )
    elif "cpu" in version:
        yield f"vllm/{VERSION_FILE} says {version}: vLLM takes 'cpu' for a CPU build"


def own_version(folder: Path) -> str | None:
    """The fork's version, as the tree's version file states it."""
    place = folder / VERSION_FILE
    if not place.is_file():
        return None
    found = re.search(r'^__version__ = "(.*)"$', read_text(place), re.MULTILINE)
    return found[1] if found else None


RULES: tuple[Callable[[Stack, str], Iterator[str]], ...] = (
    _applied,
    _format,
    _budgets,
    _series,
    _pins,
    _release,
    _alone,
    _own_files,
    _version,
)
