"""Recording releases in a history of one's own, beside that of the tree."""

import shutil
from pathlib import Path

from . import source, tree
from .history import History
from .progress import note
from .source import Source
from .stack import Stack


def record_base(loaded: Stack, history: History, offline: bool) -> str:
    """Tree id of the release that the stack is for.

    Taken from the applied tree's history where there is one, else from the sdist.
    """
    places = loaded.places
    marker, applied = tree.read_marker(places.tree), History(places.history)
    if marker and marker.base == loaded.base.version and applied.exists():
        history.adopt(applied)
        return marker.release
    given = source.resolve(None, loaded.base, offline)
    unpacked = unpack(given, history)
    source.verify(unpacked, loaded.base, complete=True)
    return record(unpacked, loaded.base.version, history)


def unpack(given: Source, history: History) -> Path:
    """The release's files, in a folder beside the history."""
    folder = history.git_dir.with_name("release")
    given.unpack(folder)
    return folder


def record(unpacked: Path, version: str, history: History) -> str:
    """Tree id of an unpacked release; its folder is removed."""
    note(f"recording vLLM {version}")
    paths = [path for path, _ in tree.scan(unpacked)]
    index = unpacked.with_name("release.index")
    recorded = history.record_release(unpacked, paths, index)
    shutil.rmtree(unpacked)
    index.unlink()
    return recorded
