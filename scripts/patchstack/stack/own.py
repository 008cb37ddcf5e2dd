"""Own files: the whole files we wrote, at their final paths in the tree.

`vllm/.gitignore` is their manifest: it ignores everything except the chain of
folders that leads to each of them.  So the list needs no git metadata, and the
upstream files that `apply` lays beside them never show up in `git status`.
"""

import re
from pathlib import Path, PurePosixPath

from ..errors import StackError, some
from ..files import read_text

MANIFEST = ".gitignore"

_HEAD = """\
# The files of this folder that are ours; the rest comes from scripts/apply.sh.
# Written by scripts/refresh.sh --own PATH (or --disown PATH).
"""


# What an ignore file takes for a pattern or drops, and names that are not UTF-8.
_UNLISTABLE = re.compile(r"[*?\[\\\udc80-\udcff]|\s$")


def listable(path: str) -> bool:
    """Whether the manifest can name the file."""
    return not _UNLISTABLE.search(path) and len(path.splitlines()) == 1


def parse(text: str) -> list[str]:
    """Return the own paths, sorted, relative to the tree."""
    kept = [line[2:] for line in text.splitlines() if line.startswith("!/")]
    return sorted(path for path in kept if not path.endswith("/"))


def render(paths: list[str]) -> str:
    """Return the manifest that keeps exactly `paths`."""
    lines = ["/*"]
    opened: set[str] = set()
    for path in sorted(paths):
        for folder in reversed(PurePosixPath(path).parents[:-1]):
            if str(folder) not in opened:
                opened.add(str(folder))
                lines += [f"!/{folder}/", f"/{folder}/*"]
        lines.append(f"!/{path}")
    return _HEAD + "\n".join(lines) + "\n"


def load(tree: Path) -> list[str]:
    """Return the own paths of the manifest; raises `StackError` if it is not ours."""
    path = tree / MANIFEST
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise StackError(
            f"{path} is missing: restore it (git checkout -- vllm)"
        ) from None
    paths = parse(text)
    if MANIFEST not in paths:
        raise StackError(f"{path} is not the list of own files: restore it from git")
    return paths


def missing(tree: Path, paths: list[str]) -> str | None:
    """Return what to do about own files that are not there; None if all are."""
    gone = [
        f"vllm/{path}"
        for path in paths
        if (tree / path).is_symlink() or not (tree / path).is_file()
    ]
    if not gone:
        return None
    return (
        f"own file {some(gone)} is missing: restore it from git, or take it off the "
        f"list: scripts/refresh.sh --disown {gone[0]}"
    )
