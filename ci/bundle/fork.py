"""The fork's own part of a bundle: package, pristine copies, tests."""

import os
import tarfile
from collections.abc import Collection
from pathlib import Path

_SKIPPED_FOLDERS = {"__pycache__"}


def package_files(tree: Path) -> dict[str, Path]:
    """Every file of the tree's ``vllm`` package, by its path in the tree."""
    files = {}
    for folder, subfolders, names in os.walk(tree / "vllm"):
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            files[path.relative_to(tree).as_posix()] = path
    return files


def from_sdist(sdist: Path, wanted: Collection[str], into: Path) -> set[str]:
    """Unpack the files of ``wanted`` (files or folders of the sdist) into ``into``.

    Returns the entries of ``wanted`` that the sdist does not hold.
    """
    missing = set(wanted)
    with tarfile.open(sdist) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            within = (w for w in wanted if path == w or path.startswith(w + "/"))
            entry = next(within, None)
            if entry is not None and member.isfile():
                member.name = path
                tar.extract(member, into, filter="data")
                missing.discard(entry)
    return missing
