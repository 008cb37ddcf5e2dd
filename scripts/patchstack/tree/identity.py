"""The identity that a running engine reports: the stack, and our files' content.

`vllm/vllm/stack_identity.py` tells it from the tree's marker, and hashes the
files again to see whether one was edited since.
"""

from collections.abc import Mapping
from pathlib import Path

from ..errors import StackError
from ..files import file_sha256, sha256
from ..stack import Stack
from .marker import Marker

PACKAGE = "vllm/"
UNKNOWN = "unknown"
EDITED = "+edited"
_SHOWN = 12


def ours(stack: Stack) -> list[str]:
    """Return the files of the package that are not upstream's: own and patched ones."""
    paths = stack.touched.union(stack.own)
    return sorted(path for path in paths if path.startswith(PACKAGE))


def files(paths: list[str], tree: Path) -> dict[str, str]:
    """Return path -> sha256 of our files, as they lie in `tree`."""
    try:
        return {path: file_sha256(tree / path) for path in paths}
    except FileNotFoundError as fault:
        path = Path(fault.filename).relative_to(tree)
        raise StackError(
            f"vllm/{path} is missing: restore it from git, or run scripts/apply.sh "
            "--discard-edits"
        ) from None


def name(digest: str, content: Mapping[str, str]) -> str:
    """Return `DIGEST.CONTENT`, the two cut to what people can compare."""
    listing = "".join(f"{it}  {path}\n" for path, it in sorted(content.items()))
    both = (digest, sha256(listing.encode()))
    return ".".join(part[:_SHOWN] for part in both)


def edited(tree: Path, marker: Marker) -> list[str]:
    """Return our files in `tree` that are not as its marker has recorded them."""
    return [
        path
        for path, digest in marker.files.items()
        if not (tree / path).is_file() or file_sha256(tree / path) != digest
    ]


def reported(tree: Path, marker: Marker | None) -> str:
    """Return what an engine that runs the package in `tree` says of itself."""
    if marker is None or not marker.identity:
        return UNKNOWN
    return marker.identity + (EDITED if edited(tree, marker) else "")
