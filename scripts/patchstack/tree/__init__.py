"""The tree `vllm/`: what lies in it, whose it is, and what it was made from."""

from collections.abc import Sequence
from dataclasses import replace

from ..errors import StackError
from ..stack import Places, Stack, own
from . import edits as edits_
from . import identity, marker, place
from .edits import KEEP_OR_DROP, Edits
from .history import Built, History
from .marker import Marker


class Tree:
    """The tree as it lies, with its marker and history."""

    def __init__(self, places: Places, history: History | None = None) -> None:
        """Look at a checkout's tree, through another history than its own if given."""
        self.places = places
        self.folder = places.tree
        self.history = history or History(places.history)
        self.marker = marker.read(self.folder)

    @property
    def applied(self) -> Marker | None:
        """The marker, if the history that it speaks of is there too."""
        if self.marker and self.history.exists():
            return self.marker
        return None

    def edits(self, own_files: Sequence[str]) -> Edits:
        """Return what was edited since apply; nothing in a tree that is not applied."""
        if not self.applied:
            return Edits()
        return edits_.find(self.folder, self.history, self.applied.head, own_files)

    def refuse_edits(self, own_files: Sequence[str]) -> None:
        """Raise `StackError` if something was edited."""
        edits = self.edits(own_files)
        if edits:
            raise StackError(f"vllm/ has local edits ({edits}): {KEEP_OR_DROP}")

    def fault(self, stack: Stack, machine: str) -> str | None:
        """Return why the tree is not what the stack makes; None if it is."""
        found = self.marker
        fault = place.unsettled(self.places) or own.missing(self.folder, stack.own)
        if fault:
            return fault
        if found is None:
            return "vllm/ is not applied: run scripts/apply.sh"
        if self.applied is None or self.history.head() != found.head:
            return "the tree's history is gone or changed: run scripts/apply.sh"
        edits = self.edits(stack.own)
        if edits:
            fault = f"vllm/ has local edits ({edits}): {KEEP_OR_DROP}"
        elif found.digest != stack.digest:
            fault = "vllm/ was made from another stack: run scripts/apply.sh"
        elif found.wheel != stack.base.wheel(machine).sha256:
            fault = f"vllm/ is made for {found.machine}: run scripts/apply.sh"
        return fault

    def adopt(self, stack: Stack, edited: bool = False) -> bool:
        """Take the tree as it lies if the changed stack would make just that.

        So it is after a new own file, a reworded patch, or a pulled patch whose edit
        was already made by hand.  With `edited` it may have edits, which stay edits.
        Builds commits, touches no file of the tree but its marker.
        """
        old = self.applied
        if old is None or old.base != stack.base.version:
            return False
        built = self.history.build(old.release, stack.base, stack.patches)
        found = edits_.find(self.folder, self.history, built.head, stack.own)
        if found and not edited:
            return False
        new = _marked(stack, built, self.history, old)
        marker.write(self.folder, new)
        self.history.settle(self.folder, new.head, new.release, new.base)
        return True

    def follow_own_edits(self, stack: Stack) -> None:
        """Own files are edited in place: let the marker's identity follow."""
        if self.marker:
            files = identity.files(identity.ours(stack), self.folder)
            if files != self.marker.files:
                name = identity.name(stack.digest, files)
                marker.write(
                    self.folder, replace(self.marker, identity=name, files=files)
                )


def _marked(stack: Stack, built: Built, history: History, old: Marker) -> Marker:
    """The marker `old` for a tree that `built` makes of the stack."""
    files = identity.files(identity.ours(stack), stack.places.tree)
    return replace(
        old,
        digest=stack.digest,
        head=built.head,
        patches=len(stack.patches),
        own=len(stack.own),
        base_files=len(history.files(built.head)),
        identity=identity.name(stack.digest, files),
        files=files,
    )
