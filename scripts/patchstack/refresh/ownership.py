"""Own files: the list of them, and the pins of what they replace."""

from collections.abc import Sequence
from dataclasses import replace

from ..errors import StackError
from ..files import read_text, sha256
from ..stack import Stack, base, own
from ..stack.base import Pin
from ..tree import Tree
from ..tree.marker import read_wheel_files
from . import ready, store
from .fold import built_as_marked
from .paths import inside


def take(stack: Stack, files: Sequence[str], why: str | None) -> list[str]:
    """Make files of the tree own files; one of upstream's needs a reason."""
    tree = ready(stack)
    built_as_marked(stack, tree)
    assert tree.marker
    released = tree.history.files(tree.marker.release)
    wheel = read_wheel_files(tree.folder)
    new, pins = [], []
    for path in (inside(stack.places, file) for file in files):
        place = tree.folder / path
        if place.is_symlink() or not place.is_file():
            raise StackError(f"vllm/{path} is not there: write it first")
        if not own.listable(path):
            raise StackError(
                f"vllm/{path} cannot be listed in {own.MANIFEST}: give it a plain name"
            )
        if path in wheel:
            raise StackError(
                f"vllm/{path} comes from the wheel and stays its own: use another name"
            )
        if path in released and not stack.base.gives_way(path):
            pins.append(_pin(stack, tree, path, released[path][1], why))
        if path not in stack.own:
            new.append(path)
    pinned = replace(stack.base, replaces=(*stack.base.replaces, *pins))
    _write(stack, [*stack.own, *new], pinned)
    return [f"vllm/{path}: own file" for path in new]


def give_up(stack: Stack, files: Sequence[str]) -> list[str]:
    """Take files off the list; what they replaced is upstream's again.

    One of them may be gone already, as after a rename.
    """
    paths = [inside(stack.places, file) for file in files]
    unknown = [path for path in paths if path not in stack.own]
    if unknown or own.MANIFEST in paths:
        raise StackError(f"vllm/{(unknown or paths)[0]} cannot be taken off")
    kept = [path for path in stack.own if path not in paths]
    built_as_marked(stack, ready(replace(stack, own=kept)))
    replaces = tuple(it for it in stack.base.replaces if it.path not in paths)
    _write(stack, kept, replace(stack.base, replaces=replaces))
    return [f"vllm/{path}: no longer an own file" for path in paths]


def _pin(stack: Stack, tree: Tree, path: str, blob: str, why: str | None) -> Pin:
    patching = [it.topic for it in stack.patches if path in it.touches]
    if patching:
        raise StackError(
            f"patches/{patching[0]}.patch edits {path}: take that out first "
            f"(scripts/refresh.sh --drop {patching[0]})"
        )
    if not why:
        raise StackError(
            f"vllm/{path} is an upstream file: say why ours takes its place: "
            f"scripts/refresh.sh --own vllm/{path} --why REASON"
        )
    return Pin(path, sha256(tree.history.blob(blob)), why)


def _write(stack: Stack, paths: list[str], pinned: base.Base) -> None:
    text = read_text(stack.places.repo / base.FILE)
    texts = {
        base.FILE: (text, base.rewritten(text, pinned)),
        f"vllm/{own.MANIFEST}": ("", own.render(paths)),
    }
    files = {path: new.encode() for path, (old, new) in texts.items() if new != old}
    if paths != stack.own or pinned != stack.base:
        store(stack, files)
