"""`refresh`: turn edits of upstream's files into patches, and keep the lists.

The edit of a file belongs to one patch; every later state of that file gets the
same edit, and the patches are the differences of the states.  Only objects and
patch files are written: the tree lies as the user left it.
"""

import argparse
import datetime
import email.utils
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import apply, base, gitcmd, own, patches, stack, tree, undo
from .base import Pin
from .errors import StackError, count, some
from .history import Built, History
from .patches import HEADERS, Patch
from .stack import Places, Stack, write
from .tree import Edits, Marker

_WRITTEN_BY_USER = tuple(key for key in HEADERS if key != "Touches")
_EXAMPLE = (
    'scripts/refresh.sh {topic} --subject "Compare FlashInfer by release" '
    '--why "a post release switched it off" --upstream-status none '
    "--drop-when tests/x.py::test_y --tests tests/x.py"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn edits of upstream's files in vllm/ into a new patch, or fold them into "
        "the named one. Without TOPIC each edit goes to the patch of its file."
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="the patch's topic")
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="only the edits of these files"
    )
    lists = parser.add_mutually_exclusive_group()
    lists.add_argument(
        "--own", nargs="+", metavar="FILE", help="take files of vllm/ as our own"
    )
    lists.add_argument(
        "--disown", nargs="+", metavar="FILE", help="take own files off the list"
    )
    lists.add_argument(
        "--pins",
        action="store_true",
        help="only write [touches] in upstream.toml, after patches were put in by hand",
    )
    text = parser.add_argument_group(
        "header lines", "all needed for a new patch; for another they replace its own"
    )
    text.add_argument("--subject", help="what the patch does, as an order")
    text.add_argument(
        "--why", help="the reason (with --own: for taking an upstream file's place)"
    )
    text.add_argument("--upstream-status", help="none, filed WHERE, merged in VERSION")
    text.add_argument("--drop-when", help="what passes on a newer base without it")
    text.add_argument("--tests", help="the tests that guard it")
    parser.add_argument(
        "--json",
        action="store_true",
        help="result as JSON on stdout (docs/schemas/refresh.v1.json)",
    )


def run(repo: Path, options: argparse.Namespace) -> int:
    with tree.locked(Places(repo)):
        loaded = stack.load(repo)
        marker = tree.read_marker(loaded.places.tree)
        history = History(loaded.places.history)
        if marker is None or not history.exists():
            raise StackError("vllm/ is not applied: run scripts/apply.sh first")
        if marker.base != loaded.base.version:
            raise StackError(
                f"vllm/ is made from vLLM {marker.base}, the stack is for "
                f"{loaded.base.version}: run scripts/apply.sh first"
            )
        work = _Work(loaded, history, marker)
        if options.pins:
            done = work.pin()
        elif options.own:
            done = work.take(options.own, options.why)
        elif options.disown:
            done = work.give_up(options.disown)
        else:
            done = work.refresh(options)
    if options.json:
        print(json.dumps({"done": done, "digest": stack.load(repo).digest}))
    else:
        print("\n".join(done) or "nothing to do")
    return 0


@dataclass(frozen=True)
class _Work:
    loaded: Stack
    history: History
    marker: Marker

    def pin(self) -> list[str]:
        touches = self._touches(self.loaded.patches)
        if touches == self.loaded.base.touches:
            return []
        self._write_base(lambda text: base.with_touches(text, touches))
        return [f"{base.FILE}: {len(touches)} files in [touches]"]

    def take(self, files: Sequence[str], why: str | None) -> list[str]:
        """Make files of the tree own files; one of upstream's needs a reason."""
        self._built()
        released = self.history.files(self.marker.release)
        wheel = tree.read_wheel_files(self.loaded.places.tree)
        paths = [self._inside(file) for file in files]
        pins = []
        for path in paths:
            place = self.loaded.places.tree / path
            if place.is_symlink() or not place.is_file():
                raise StackError(f"vllm/{path} is not there: write it first")
            if not own.listable(path):
                raise StackError(
                    f"vllm/{path} cannot be listed in {own.MANIFEST}: give it a plain "
                    "name"
                )
            if path in wheel:
                raise StackError(
                    f"vllm/{path} comes from the wheel and stays its own: use another "
                    "name"
                )
            if path in released and not self.loaded.base.gives_way(path):
                pins.append(self._replacement(path, released[path][1], why))
        new = [path for path in paths if path not in self.loaded.own]
        if not new:
            return []

        def rewrite(text: str) -> str:
            for pin in pins:
                text = base.with_replaced(text, pin)
            return text

        self._write_own([*self.loaded.own, *new], rewrite)
        return [f"vllm/{path}: own file" for path in new]

    def give_up(self, files: Sequence[str]) -> list[str]:
        """Take files off the list; what they replaced is upstream's again."""
        self._built()
        paths = [self._inside(file) for file in files]
        unknown = [path for path in paths if path not in self.loaded.own]
        if unknown or own.MANIFEST in paths:
            raise StackError(f"vllm/{(unknown or paths)[0]} cannot be taken off")
        replaced = {pin.path for pin in self.loaded.base.replaces}

        def rewrite(text: str) -> str:
            for path in replaced.intersection(paths):
                text = base.without_pin(text, path)
            return text

        kept = [path for path in self.loaded.own if path not in paths]
        self._write_own(kept, rewrite)
        return [f"vllm/{path}: no longer an own file" for path in paths]

    def refresh(self, options: argparse.Namespace) -> list[str]:
        built = self._built()
        edits = self._edits(built, options.paths)
        series = list(self.loaded.patches)
        target = _find(series, options.topic)
        if options.topic and target is None:
            target = len(series)
            series.append(_new_patch(self.loaded, options, edits))
        elif target is not None:
            series[target] = _reworded(series[target], options)
        elif any(_headers(options).values()):
            raise StackError("name the TOPIC that the header lines are for")
        targets = {
            path: target if target is not None else _only_patch(series, path)
            for path in edits
        }
        refreshed, tree_id = self._fold(series, built, targets)
        kept = [patch for patch in refreshed if patch.files]
        dropped = [patch for patch in refreshed if not patch.files]
        self._store(kept, tree_id)
        before = self.loaded.raw
        return [
            *(
                f"patches/{patch.name}: "
                f"{'rewritten' if patch.name in before else 'new'}, "
                f"{count(len(patch.files), 'file')}, "
                f"quotes {count(patch.quoted, 'upstream line')}"
                for patch in kept
                if before.get(patch.name) != patch.to_bytes()
            ),
            *(
                f"patches/{patch.name}: dropped, nothing is left of its edit"
                for patch in dropped
            ),
        ]

    def _built(self) -> Built:
        """The stack's commits; the tree must have been made from these patches."""
        loaded = self.loaded
        built = self.history.build(self.marker.release, loaded.base, loaded.patches)
        trees = [self.history.tree_of(it) for it in (built.head, self.marker.head)]
        if trees[0] != trees[1]:
            raise StackError(
                "the patches are not those that vllm/ was made from: run "
                "scripts/apply.sh first (with edits to keep: check out the patches "
                "they were made on, refresh there, then merge)"
            )
        return built

    def _edits(self, built: Built, only: Sequence[str]) -> list[str]:
        places = self.loaded.places
        edits = tree.find_edits(places, self.history, built.head, self.loaded.own)
        if only:
            chosen = {self._inside(path) for path in only}
            clean = sorted(chosen - set(edits.all()))
            if clean:
                raise StackError(f"vllm/{clean[0]} has no edit: nothing was changed")
            edits = Edits(
                *(
                    [path for path in paths if path in chosen]
                    for paths in (
                        edits.modified, edits.deleted, edits.added, edits.binaries
                    )
                )
            )  # fmt: skip
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

    def _fold(
        self, series: list[Patch], built: Built, targets: Mapping[str, int]
    ) -> tuple[list[Patch], str]:
        """The patches with the edits in them, and the tree they all make."""
        # A patch that is new here has changed nothing so far.
        commits = built.commits + [built.head] * (len(series) + 1 - len(built.commits))
        states = [self.history.files(commit) for commit in commits]
        changes: list[dict[str, tuple[str, str]]] = [{} for _ in commits]
        for path, target in targets.items():
            edited = self._store_edit(path, states[-1][path])
            for at in range(target + 1, len(states)):
                changes[at][path] = self._with_edit(
                    path, states[at][path], states[-1][path], edited
                )
        trees = [
            self.history.with_blobs(self.history.tree_of(commit), blobs)
            for commit, blobs in zip(commits, changes, strict=True)
        ]
        refreshed = [
            patch.with_files(
                self.history.diff(f"patches/{patch.name}", trees[at], trees[at + 1])
            )
            for at, patch in enumerate(series)
        ]
        return refreshed, trees[-1]

    def _store_edit(self, path: str, was: tuple[str, str]) -> tuple[str, str]:
        place = self.loaded.places.tree / path
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

    def _with_edit(
        self,
        path: str,
        state: tuple[str, str],
        last: tuple[str, str],
        edited: tuple[str, str],
    ) -> tuple[str, str]:
        """A state of a file with the edit that leads from `last` to `edited`."""
        if state == last:
            return edited
        blobs = (state[1], last[1], edited[1])
        merged, conflicts = self.history.merge(*blobs, names=("", "", ""))
        if conflicts:
            last_patch = [p for p in self.loaded.patches if path in p.touches][-1]
            raise StackError(
                f"the edit of vllm/{path} lies on lines that a later patch "
                f"changes: fold it there: scripts/refresh.sh {last_patch.topic}"
            )
        return state[0], self.history.store(merged)

    def _store(self, kept: list[Patch], tree_id: str) -> None:
        """Write the patches once they are proven to make the tree."""
        loaded, places = self.loaded, self.loaded.places
        raw = {patch.name: patch.to_bytes() for patch in kept}
        faults = []
        for patch in kept:
            parsed = patches.parse(patch.name, raw[patch.name])
            if raw[patch.name] != loaded.raw.get(patch.name):
                faults += patches.lint(
                    parsed, raw[patch.name], loaded.base.budget(patch.topic)
                )
        if faults:
            raise StackError("; ".join(faults))
        built = self.history.build(self.marker.release, loaded.base, kept)
        if self.history.tree_of(built.head) != tree_id:
            raise StackError("the new patches do not make the tree: please report this")
        touches = self._touches(kept)
        left = {patch.topic for patch in kept}

        def rewrite(text: str) -> str:
            if touches != loaded.base.touches:
                text = base.with_touches(text, touches)
            for topic in loaded.base.budgets.keys() - left:
                text = base.without_budget(text, topic)
            return text

        names = [stack.SERIES, *loaded.raw.keys(), *(raw.keys() - loaded.raw.keys())]
        files = [base.FILE, *(f"patches/{name}" for name in names)]
        with tree.signals_blocked():
            with undo.on_failure(places, files):
                self._write_base(rewrite)
                places.patches.mkdir(exist_ok=True)
                for name, data in raw.items():
                    if data != loaded.raw.get(name):
                        write(places.patches / name, data)
                self._write_series(list(raw))
                for name in loaded.raw.keys() - raw.keys():
                    (places.patches / name).unlink()
            # Not before: under a marker of new patches, old ones would be taken for
            # another stack, and its tree would take the place of the edits.
            apply.record(stack.load(places.repo), self.marker, built)

    def _write_series(self, names: list[str]) -> None:
        place = self.loaded.places.patches / stack.SERIES
        old = place.read_text() if place.exists() else ""
        text = stack.with_series(old, names, self.loaded.raw)
        if text != old:
            write(place, text.encode())

    def _touches(self, series: Sequence[Patch]) -> dict[str, str]:
        released = self.history.files(self.marker.release)
        touches = {}
        for patch in series:
            for path in patch.touches:
                if path not in released:
                    raise StackError(f"patches/{patch.name}: {path} is not in the base")
                data = self.history.blob(released[path][1])
                touches[path] = stack.sha256(data)
        return dict(sorted(touches.items()))

    def _replacement(self, path: str, blob: str, why: str | None) -> Pin:
        patching = [it.name for it in self.loaded.patches if path in it.touches]
        if patching:
            raise StackError(f"patches/{patching[0]} edits {path}: drop that first")
        if not why:
            raise StackError(
                f"vllm/{path} is an upstream file: say why ours takes its place: "
                f"scripts/refresh.sh --own vllm/{path} --why REASON"
            )
        return Pin(path, stack.sha256(self.history.blob(blob)), why)

    def _write_base(self, rewrite: Callable[[str], str]) -> None:
        place = self.loaded.places.repo / base.FILE
        old = place.read_text()
        if (new := rewrite(old)) != old:
            write(place, new.encode())

    def _write_own(self, paths: list[str], rewrite: Callable[[str], str]) -> None:
        """Write the list of own files, and what `upstream.toml` says of them."""
        places = self.loaded.places
        with undo.on_failure(places, [base.FILE, f"vllm/{own.MANIFEST}"]):
            self._write_base(rewrite)
            write(places.tree / own.MANIFEST, own.render(paths).encode())
        loaded = stack.load(places.repo)
        built = self.history.build(self.marker.release, loaded.base, loaded.patches)
        apply.record(loaded, self.marker, built)

    def _inside(self, file: str) -> str:
        """Path relative to the tree, of a file named from here or from a root."""
        places = self.loaded.places
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


def _find(series: Sequence[Patch], topic: str | None) -> int | None:
    for at, patch in enumerate(series):
        if topic in (patch.topic, patch.name):
            return at
    return None


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


def _headers(options: argparse.Namespace) -> dict[str, str | None]:
    values = (options.why, options.upstream_status, options.drop_when, options.tests)
    wrapped = [value and _wrapped(value) for value in values]
    return dict(zip(_WRITTEN_BY_USER, wrapped, strict=True)) | {
        "Subject": options.subject
    }


def _wrapped(value: str) -> str:
    # Names of tests and files stay in one piece.
    fold = textwrap.TextWrapper(72, break_long_words=False, break_on_hyphens=False).wrap
    return "\n".join(line for part in value.splitlines() for line in fold(part))


def _new_patch(
    loaded: Stack, options: argparse.Namespace, edits: Sequence[str]
) -> Patch:
    given = _headers(options)
    number = max((patch.number for patch in loaded.patches), default=0) + 1
    patches.split_name(f"{number:04}-{options.topic}.patch")
    if not edits:
        raise StackError(
            f"no patch {options.topic!r}, and no edit in vllm/ to make one"
        )
    missing = [f"--{key.lower()}" for key, value in given.items() if not value]
    if missing:
        raise StackError(
            f"the new patch {options.topic!r} needs {' '.join(missing)}, for example: "
            + _EXAMPLE.format(topic=options.topic)
        )
    now = datetime.datetime.now(datetime.UTC)
    return Patch(
        number,
        options.topic,
        author=gitcmd.user_identity(loaded.places.repo),
        date=email.utils.format_datetime(now),
        subject=given.pop("Subject") or "",
        body="",
        headers={key: value for key, value in given.items() if value},
        files=(),
    )


def _reworded(patch: Patch, options: argparse.Namespace) -> Patch:
    given = {key: value for key, value in _headers(options).items() if value}
    subject = given.pop("Subject", patch.subject)
    return replace(patch, subject=subject, headers=patch.headers | given)
