"""Rewriting the stack's own files, all or nothing.

The old files lie in a folder beside the tree until the rewrite is done; a run that
cannot finish it, or whoever next takes the lock, puts them back.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import StackError
from ..files import read_text, write
from . import SERIES, Places, Stack, with_series
from . import base as pins
from . import patch as format_
from .base import Base
from .patch import Patch

_LIST = "undo.json"

Files = Mapping[str, bytes | None]
"""Content by path in the repository; None takes the file away."""


def changes(
    stack: Stack, patches: Sequence[Patch], base: Base
) -> dict[str, bytes | None]:
    """Return the files to write for other patches on a base.

    Raises `StackError` if a patch that has changed breaks a rule of the format.
    """
    budgets = tuple(it for it in base.budgets if it.patch in {p.topic for p in patches})
    base = Base(**vars(base) | {"budgets": budgets})
    known = {it.name: it.data for it in stack.patches}
    news = [it for it in patches if known.get(it.name) != it.data]
    faults = [fault for it in news for fault in format_.lint(it, base.budget(it.topic))]
    if faults:
        raise StackError("; ".join(faults))
    places = stack.places
    files: dict[str, bytes | None] = {f"patches/{it.name}": it.data for it in news}
    names = [it.name for it in patches]
    files |= {f"patches/{name}": None for name in known if name not in names}
    place = places.patches / SERIES
    old = read_text(place) if place.exists() else ""
    texts = {
        f"patches/{SERIES}": with_series(old, names),
        pins.FILE: pins.rewritten(read_text(places.repo / pins.FILE), base),
    }
    for path, text in texts.items():
        place = places.repo / path
        if not place.exists() or read_text(place) != text:
            files[path] = text.encode()
    return files


@contextmanager
def rewriting(
    places: Places, files: Files, guarded: Sequence[str] = ()
) -> Iterator[None]:
    """Write the files; put all back if what is done meanwhile fails.  Needs the lock.

    Files that are `guarded` are not written here, but put back too.
    """
    keep(places, [*files, *guarded])
    try:
        for path, data in files.items():
            place = places.repo / path
            if data is None:
                place.unlink()
            else:
                place.parent.mkdir(exist_ok=True)
                write(place, data)
        yield
    except BaseException:
        restore(places)
        raise
    _forget(places)


def pending(places: Places) -> bool:
    """Whether a rewrite was begun and not finished."""
    return (places.undo / _LIST).exists()


def keep(places: Places, paths: Sequence[str]) -> None:
    """Keep the files as they are; some may not be there yet."""
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
