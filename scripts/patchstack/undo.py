"""Undo of a rewrite of the stack's own files, for a run that cannot finish it.

The old files lie in a folder beside the tree until the rewrite is done; whoever
next takes the lock puts them back.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .stack import Places, write

_LIST = "undo.json"


def pending(places: Places) -> bool:
    """Whether a rewrite was begun and not finished."""
    return (places.undo / _LIST).exists()


@contextmanager
def on_failure(places: Places, paths: Iterable[str]) -> Iterator[None]:
    """All or nothing for the files `paths` of the repository; needs the lock.

    Files that are not there yet may be among them.
    """
    keep(places, paths)
    try:
        yield
    except BaseException:
        restore(places)
        raise
    _forget(places)


def keep(places: Places, paths: Iterable[str]) -> None:
    """Keep the files as they are."""
    _forget(places)
    present = {path: (places.repo / path).exists() for path in paths}
    for path, is_there in present.items():
        if is_there:
            _kept(places, path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(places.repo / path, _kept(places, path))
    places.undo.mkdir(exist_ok=True)
    # Written last: without it nothing has been rewritten yet.
    write(places.undo / _LIST, json.dumps(present).encode())


def restore(places: Places) -> None:
    """Put the files back as they were."""
    present = json.loads((places.undo / _LIST).read_text())
    for path, was_there in present.items():
        place, old = places.repo / path, _kept(places, path)
        if not was_there:
            place.unlink(missing_ok=True)
        # What could not be written need not be written back.
        elif not place.exists() or place.read_bytes() != old.read_bytes():
            write(place, old.read_bytes())
    _forget(places)


def _forget(places: Places) -> None:
    (places.undo / _LIST).unlink(missing_ok=True)
    if places.undo.exists():
        shutil.rmtree(places.undo)


def _kept(places: Places, path: str) -> Path:
    return places.undo / "files" / path
