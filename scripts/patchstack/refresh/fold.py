"""Edits of upstream's files, folded into the patches.

The edit of a file belongs to one patch; every later state of that file gets the
same edit, and the patches are the differences of the states.
"""

from collections.abc import Mapping, Sequence

from ..errors import StackError, count, some
from ..stack import Stack, rewrite
from ..stack.patch import Patch
from ..tree import Tree
from ..tree.history import Built, Entry
from . import ready, store, words
from .paths import inside
from .words import Words


def fold(
    stack: Stack, topic: str | None, paths: Sequence[str], said: Words
) -> list[str]:
    """Fold the edits, or those of `paths`, into the patch of a topic.

    Without a topic each goes to the patch of its file.  Returns what was done, a line
    each.
    """
    tree = ready(stack)
    built = built_as_marked(stack, tree)
    edits = _edits(stack, tree, paths)
    series = list(stack.patches)
    target = _find(series, topic)
    if topic and target is None:
        target = len(series)
        if not edits:
            raise StackError(f"no patch {topic!r}, and no edit in vllm/ to make one")
        new = words.reworded(words.draft(stack.places, topic), said)
        series.append(words.complete(stack.places, new))
    elif target is not None:
        series[target] = words.reworded(series[target], said)
    elif said:
        raise StackError("name the TOPIC that the header lines are for")
    targets = {
        path: target if target is not None else _only_patch(series, path)
        for path in edits
    }
    folded = _Folding(stack, tree, built).run(series, targets)
    store(stack, rewrite.changes(stack, folded, stack.base))
    return _told(stack, series, folded)


def built_as_marked(stack: Stack, tree: Tree) -> Built:
    """Return the stack's commits; the tree must have been made from these patches."""
    assert tree.marker
    built = tree.history.build(tree.marker.release, stack.base, stack.patches)
    trees = {tree.history.tree_of(it) for it in (built.head, tree.marker.head)}
    if len(trees) > 1:
        raise StackError(
            "the patches are not those that vllm/ was made from: run "
            "scripts/apply.sh first (with edits to keep: check out the patches "
            "they were made on, refresh there, then merge)"
        )
    return built


def _told(stack: Stack, series: Sequence[Patch], folded: Sequence[Patch]) -> list[str]:
    before = {it.name: it.data for it in stack.patches}
    names = {it.name for it in folded}
    return [
        *(
            f"patches/{it.name}: {'rewritten' if it.name in before else 'new'}, "
            f"{count(len(it.files), 'file')}, "
            f"quotes {count(it.quoted, 'upstream line')}"
            for it in folded
            if before.get(it.name) != it.data
        ),
        *(
            f"patches/{it.name}: dropped, nothing is left of its edit"
            for it in series
            if it.name not in names
        ),
    ]


def _edits(stack: Stack, tree: Tree, only: Sequence[str]) -> list[str]:
    edits = tree.edits(stack.own)
    if only:
        chosen = {inside(stack.places, path) for path in only}
        found = edits.only(chosen)
        clean = sorted(chosen.difference(*vars(found).values()))
        if clean:
            raise StackError(f"vllm/{clean[0]} has no edit: nothing was changed")
        edits = found
    if edits.added:
        raise StackError(
            f"new files ({some(edits.added)}) go into no patch: take them as own "
            "files (scripts/refresh.sh --own PATH), delete them, or name the PATHs "
            "to refresh"
        )
    if edits.deleted:
        raise StackError(
            f"patches delete no files ({some(edits.deleted)}): list them as "
            "[[removes]] in upstream.toml, or put them back"
        )
    if edits.binaries:
        raise StackError(
            f"files of the wheel ({some(edits.binaries)}) cannot be patched: put "
            "them back with scripts/apply.sh --discard-edits, or name the PATHs to "
            "refresh"
        )
    return edits.modified


def _find(series: Sequence[Patch], topic: str | None) -> int | None:
    named = (at for at, it in enumerate(series) if topic in (it.topic, it.name))
    return next(named, None)


def _only_patch(series: Sequence[Patch], path: str) -> int:
    touching = [at for at, patch in enumerate(series) if path in patch.touches]
    if len(touching) == 1:
        return touching[0]
    if not touching:
        raise StackError(
            f"no patch edits vllm/{path} yet: name a topic: scripts/refresh.sh TOPIC"
        )
    names = ", ".join(series[at].topic for at in touching)
    raise StackError(
        f"vllm/{path} is edited by several patches: name one: scripts/refresh.sh "
        f"TOPIC, of {names}"
    )


class _Folding:
    def __init__(self, stack: Stack, tree: Tree, built: Built) -> None:
        self.stack, self.tree, self.history = stack, tree, tree.history
        self.built = built

    def run(self, series: Sequence[Patch], targets: Mapping[str, int]) -> list[Patch]:
        """The patches with the edits in them; those with nothing left are gone."""
        # A patch that is new here has changed nothing so far.
        commits = self.built.commits
        commits = commits + [commits[-1]] * (len(series) + 1 - len(commits))
        states = [self.history.files(commit) for commit in commits]
        changes: list[dict[str, Entry]] = [{} for _ in commits]
        for path, target in targets.items():
            edited = self._store(path, states[-1][path])
            for at in range(target + 1, len(states)):
                state = states[at][path]
                changes[at][path] = self._with_edit(
                    path, state, states[-1][path], edited
                )
        parent = commits[0]
        before = self.history.tree_of(parent)
        folded = []
        for at, patch in enumerate(series, 1):
            trunk = self.history.tree_of(commits[at])
            after = self.history.with_blobs(trunk, changes[at])
            if after != before:
                parent, sealed = self.history.seal(patch, after, parent)
                folded.append(sealed)
            before = after
        return folded

    def _store(self, path: str, was: Entry) -> Entry:
        place = self.tree.folder / path
        mode = "120000" if place.is_symlink() else "100644"
        if mode == "100644" and place.stat().st_mode & 0o100:
            mode = "100755"
        if mode != was[0]:
            raise StackError(
                f"vllm/{path} changed its file mode ({was[0]} to {mode}), which a "
                "patch cannot: put it back"
            )
        data = place.read_bytes()
        if b"\0" in data:
            raise StackError(f"vllm/{path} is binary, which a patch cannot hold")
        return mode, self.history.store(data)

    def _with_edit(self, path: str, state: Entry, last: Entry, edited: Entry) -> Entry:
        """A state of a file with the edit that leads from `last` to `edited`."""
        if state == last:
            return edited
        blobs = (state[1], last[1], edited[1])
        merged, conflicts = self.history.merge(blobs, ("", "", ""))
        if conflicts:
            later = [it.topic for it in self.stack.patches if path in it.touches][-1]
            raise StackError(
                f"the edit of vllm/{path} lies on lines that a later patch "
                f"changes: fold it there: scripts/refresh.sh {later}"
            )
        return state[0], self.history.store(merged)
