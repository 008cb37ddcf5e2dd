"""What lies in the tree about itself: what it was made from.

Commits of any age read the markers of any other, as `git switch` needs it: the fields
are fixed, and what else a marker holds is not looked at.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ..release.archive import WheelFile

MARKER = ".stack.json"
WHEEL_FILES = ".stack.wheel.json"
WHEEL_SOURCE = "wheel"
"""What the marker of a wheel of the fork names as its source."""


@dataclass(frozen=True)
class Marker:
    """What a tree was made from; lies in the tree as `.stack.json`."""

    base: str
    """version of the upstream release"""
    digest: str
    """of the stack"""
    head: str
    """commit of the last patch"""
    release: str
    """tree id of the whole release"""
    source: str
    """of the base: sdist, folder or clone"""
    machine: str
    wheel: str
    """sha256 of the release wheel"""
    patches: int
    """how many"""
    own: int
    """how many own files"""
    base_files: int
    wheel_files: int
    identity: str = ""
    """what an engine reports"""
    files: Mapping[str, str] = field(default_factory=dict)
    """sha256 of our files in the package, by path, as they were applied"""


def read(tree: Path) -> Marker | None:
    """Return the tree's marker; None if the tree is not applied."""
    known = {it.name for it in fields(Marker)}
    try:
        found = json.loads((tree / MARKER).read_text())
        return Marker(**{key: it for key, it in found.items() if key in known})
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None


def write(tree: Path, marker: Marker) -> None:
    """Write the marker into the tree, whole or not at all."""
    place = tree / MARKER
    partial = place.with_name(MARKER + ".part")
    partial.write_text(json.dumps(asdict(marker), indent=1) + "\n")
    partial.replace(place)


def read_wheel_files(tree: Path) -> dict[str, WheelFile]:
    """Return the files that only the wheel has, as apply laid them."""
    try:
        listed = json.loads((tree / WHEEL_FILES).read_text())
        return {path: WheelFile(*facts) for path, facts in listed.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def write_wheel_files(tree: Path, files: Mapping[str, WheelFile]) -> None:
    """Write the list of what came from the wheel into the tree."""
    listed = {
        path: (it.size, it.mtime_ns, it.sha256) for path, it in sorted(files.items())
    }
    (tree / WHEEL_FILES).write_text(json.dumps(listed, indent=0) + "\n")
