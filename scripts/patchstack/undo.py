"""Undo of a rewrite of the stack's own files, for a run that cannot finish it.

The old files lie in the work folder of the rebase until the rewrite is done;
whoever next takes the lock puts them back.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from .stack import Places, write

_LIST = "undo.json"


def pending(places: Places) -> bool:
    """Whether a rewrite was begun and not finished."""
    return (places.rebase / _LIST).exists()


def keep(places: Places, paths: Iterable[str]) -> None:
    """Keep the files `paths` of the repository, those that are not there included."""
    folder = places.rebase / "undo"
    if folder.exists():
        shutil.rmtree(folder)
    present = {path: (places.repo / path).exists() for path in paths}
    for path, is_there in present.items():
        if is_there:
            _kept(places, path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(places.repo / path, _kept(places, path))
    # Written last: without it nothing has been rewritten yet.
    write(places.rebase / _LIST, json.dumps(present).encode())


def forget(places: Places) -> None:
    """The rewrite is done."""
    (places.rebase / _LIST).unlink()


def restore(places: Places) -> None:
    """Put the files back as they were."""
    listed = places.rebase / _LIST
    for path, was_there in json.loads(listed.read_text()).items():
        if was_there:
            write(places.repo / path, _kept(places, path).read_bytes())
        else:
            (places.repo / path).unlink(missing_ok=True)
    listed.unlink()


def _kept(places: Places, path: str) -> Path:
    return places.rebase / "undo" / path
