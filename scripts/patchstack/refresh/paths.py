"""Files of the tree, as users name them."""

from pathlib import Path

from ..errors import StackError
from ..stack import Places


def inside(places: Places, file: str) -> str:
    """Return the path in the tree of a file named from here or from a root."""
    top = places.tree.resolve()
    found = []
    for start in (_here(), places.repo, places.tree):
        place = start / file
        place = place.parent.resolve() / place.name
        if place.is_relative_to(top):
            found.append(place)
    for place in [place for place in found if place.exists()] or found[:1]:
        return place.relative_to(top).as_posix()
    raise StackError(f"{file} is not a file below vllm/")


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        # Apply has replaced the folder that the user's shell stands in.
        return Path("/")
