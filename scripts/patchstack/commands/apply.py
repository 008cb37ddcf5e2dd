"""`apply`: make the tree from the base, our own files and the patches."""

import argparse
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import StackError, count
from ..progress import note
from ..stack import Places, Stack, load
from ..tree import Tree, make, place
from ..tree.make import Made, Unmade, Wanted
from ..tree.marker import Marker
from . import as_json, schema_option


@dataclass(frozen=True, kw_only=True)
class Applied(Marker):
    """A tree that is there."""

    state: Made
    seconds: float


@dataclass(frozen=True)
class Unapplied:
    """With --unapply."""

    state: Unmade
    seconds: float


@dataclass(frozen=True)
class Checked:
    """With --check."""

    state: Literal["applied", "stale"]
    fault: str | None
    digest: str
    """of the stack"""


PRINTS = {"apply.v1": Applied | Unapplied | Checked}
_DONE = {
    "applied": "applied",
    "adopted": "already as the new stack makes it",
    "unchanged": "nothing to do",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Make vllm/ from the pinned upstream release, our own files and the patches. "
        "All or nothing; a second run changes nothing."
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE|DIR|GIT-URL@TAG",
        help="the base as an sdist, a source folder or a clone (default: the pinned "
        "sdist from the package index, cached)",
    )
    parser.add_argument("--wheel", metavar="FILE", help="the pinned release wheel")
    parser.add_argument(
        "--machine",
        default=platform.machine(),
        help="architecture of the compiled files (default: %(default)s)",
    )
    parser.add_argument("--offline", action="store_true", help="use only the cache")
    parser.add_argument(
        "--discard-edits",
        action="store_true",
        help="drop local edits of upstream's files (never those of own files)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="change nothing; exit code 0 if the tree is applied and unedited",
    )
    mode.add_argument(
        "--unapply", action="store_true", help="leave only our own files in vllm/"
    )
    parser.add_argument("--json", action="store_true", help=schema_option("apply"))


def run(repo: Path, options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if options.check:
        return _check(load(repo), options.machine, options.json)
    started = time.monotonic()
    inside = _stands_in(repo / "vllm")
    places = Places(repo)
    with place.locked(places):
        try:
            # Read under the lock: the run we waited for may have changed it.
            if options.unapply:
                unmade = make.unapply(load(repo), options.discard_edits)
                changed = unmade == "unapplied"
                _print_unapplied(unmade, time.monotonic() - started, options.json)
            else:
                made = make.apply(load(repo), _wanted(options))
                changed = made == "applied"
                _print_applied(places, made, time.monotonic() - started, options.json)
        finally:
            place.clean(places)
    if inside and changed:
        note("your shell stands in the folder that was replaced: cd to it again")
    return 0


def _wanted(options: argparse.Namespace) -> Wanted:
    return Wanted(
        options.machine,
        options.source,
        options.wheel,
        options.offline,
        options.discard_edits,
    )


def _stands_in(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:
        return False


def _check(stack: Stack, machine: str, json: bool) -> int:
    fault = Tree(stack.places).fault(stack, machine)
    if json:
        print(as_json(Checked("stale" if fault else "applied", fault, stack.digest)))
    elif fault:
        raise StackError(fault)
    else:
        print(f"vllm/ is applied and unedited (stack {stack.digest[:12]})")
    return 1 if fault else 0


def _print_unapplied(state: Unmade, seconds: float, json: bool) -> None:
    if json:
        print(as_json(Unapplied(state, round(seconds, 2))))
    else:
        print(f"vllm/ holds only our own files ({seconds:.1f} s)")


def _print_applied(places: Places, state: Made, seconds: float, json: bool) -> None:
    marker = Tree(places).marker
    assert marker
    if json:
        print(as_json(Applied(**vars(marker), state=state, seconds=round(seconds, 2))))
        return
    patches, own = count(marker.patches, "patch"), count(marker.own, "own file")
    print(
        f"vLLM {marker.base} + {patches} + {own}, stack {marker.identity}: "
        f"{_DONE[state]} ({seconds:.1f} s)"
    )
    if state == "applied":
        print(f"  base   {marker.base_files} files from the {marker.source}")
        print(f"  wheel  {marker.wheel_files} files for {marker.machine}")
        print("next: pip install -e vllm")
