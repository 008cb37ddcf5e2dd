"""Edits of upstream's files turned into patches, patches put in order, own files.

Only objects and files of the stack are written here; the tree follows by `tree.make`,
or lies already as the new patches make it.
"""

from ..errors import StackError
from ..stack import Stack, load, own, rewrite
from ..tree import Tree, make, place
from ..tree.marker import MARKER


def ready(stack: Stack) -> Tree:
    """Return the tree, applied and whole but for edits; else raises `StackError`."""
    tree = Tree(stack.places)
    if tree.marker is None:
        raise StackError("vllm/ is not applied: run scripts/apply.sh first")
    if tree.marker.base != stack.base.version:
        raise StackError(
            f"vllm/ is made from vLLM {tree.marker.base}, the stack is for "
            f"{stack.base.version}: run scripts/apply.sh first"
        )
    missing = own.missing(tree.folder, stack.own)
    if missing:
        raise StackError(missing)
    if not tree.applied:
        try:
            make.restore_history(tree, stack, offline=False)
        finally:
            place.clean(stack.places)
    return tree


def store(stack: Stack, files: rewrite.Files) -> None:
    """Write files of a stack that makes the tree as it lies, but for edits left."""
    guarded = [f"vllm/{MARKER}"]
    with place.signals_blocked(), rewrite.rewriting(stack.places, files, guarded):
        Tree(stack.places).adopt(load(stack.places.repo), edited=True)
