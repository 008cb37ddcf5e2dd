"""The fork's version, as the tree's version file states it."""

import re
from pathlib import Path

from ..files import read_text

FILE = "vllm/_version.py"
_LINE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)


def read(tree: Path) -> str | None:
    """Return the version in the tree's file; None if there is none."""
    place = tree / FILE
    found = _LINE.search(read_text(place)) if place.is_file() else None
    return found[1] if found else None


def for_release(text: str, release: str) -> str:
    """Return the version file for another release; our count starts again at 1."""

    def rewrite(found: re.Match[str]) -> str:
        name = re.sub(r"\.\d+$", "", found[1].partition("+")[2])
        return f'__version__ = "{release}+{name}.1"'

    return _LINE.sub(rewrite, text, count=1)
