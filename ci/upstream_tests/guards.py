"""The lists of upstream tests that guard what we touch, with a reason each."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from cli import Fault


@dataclass(frozen=True)
class Guard:
    """An entry of a list."""

    path: str
    """File or folder below the tree."""
    why: str


def load(place: Path) -> list[Guard]:
    """Read a list; raises `Fault` for an entry without a reason.

    A list is TOML: a path on the left, the reason on the right.
    """
    try:
        entries = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Fault(f"{place} is missing: restore it from git") from None
    except tomllib.TOMLDecodeError as fault:
        raise Fault(f"{place} is not valid TOML: {fault}") from None
    for path, why in entries.items():
        if not isinstance(why, str) or not why.strip():
            raise Fault(f"{place.name}: {path} has no reason: state one")
    return [Guard(path, why) for path, why in entries.items()]


def missing(guards: list[Guard], tree: Path) -> list[str]:
    """Listed paths that a tree does not have."""
    return [guard.path for guard in guards if not (tree / guard.path).exists()]
