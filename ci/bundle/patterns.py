"""Lists with reasons: one entry a line, a comment says why it is there."""

import fnmatch
from collections.abc import Iterable
from pathlib import Path


def read(path: Path) -> list[str]:
    """The entries of a list file, without comments and blank lines."""
    lines = (line.split("#", 1)[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``patterns`` or lies below one of them."""
    return any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern + "/*")
        for pattern in patterns
    )
