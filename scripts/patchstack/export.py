"""`export`: the whole fork as one mailbox, for plain `git am` on a clean base."""

import argparse
import base64
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.header import Header
from email.utils import formataddr, parseaddr
from pathlib import Path

from . import apply, checks, gitcmd, releases, stack, tree
from .archive import PACKAGE
from .base import Pin
from .errors import StackError, count, some
from .history import History
from .patches import MAGIC, Patch
from .stack import Places, Stack, write

_PERSON = "patch stack <patchstack@localhost>"
_DATE = "Thu, 01 Jan 2026 00:00:00 +0000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the whole fork, own files and patches, as one mailbox. 'git am OUT' on "
        "a clean base (upstream's repository at the base's tag) makes the tree that "
        "apply makes, what only the sdist or the wheel brings aside."
    )
    parser.add_argument("out", metavar="OUT", help="the mailbox to write")
    parser.add_argument("--offline", action="store_true", help="use only the cache")
    parser.add_argument(
        "--json",
        action="store_true",
        help="result as JSON on stdout (docs/schemas/export.v1.json)",
    )


def run(repo: Path, options: argparse.Namespace) -> int:
    out = Path(options.out)
    if out.is_dir() or not out.parent.is_dir():
        raise StackError(f"{out} cannot be written as a file: name another OUT")
    with tree.locked(Places(repo)), tempfile.TemporaryDirectory() as temporary:
        loaded = stack.load(repo)
        _refuse_edits(loaded)
        history = History(Path(temporary) / "git")
        history.create()
        release = releases.record_base(loaded, history, options.offline)
        mails = export(loaded, history, release)
    write(out, b"".join(mails))
    if options.json:
        print(json.dumps({"mails": len(mails), "base": loaded.base.version}))
    else:
        print(f"{out}: {count(len(mails), 'mail')} for vLLM {loaded.base.version}")
    return 0


def _refuse_edits(loaded: Stack) -> None:
    places, history = loaded.places, History(loaded.places.history)
    marker = tree.read_marker(places.tree)
    if marker and history.exists():
        edits = tree.find_edits(places, history, marker.head, loaded.own)
        if edits:
            raise StackError(
                f"vllm/ has local edits ({tree.describe(edits)}): {apply.KEEP_OR_DROP}"
            )
    changed = gitcmd.changed_files(places.repo)
    edited = [f"vllm/{path}" for path in loaded.own if f"vllm/{path}" in changed]
    if edited:
        raise StackError(f"{some(edited)} changed since the last commit: commit first")


@dataclass(frozen=True)
class _Step:
    """One mail's change."""

    author: str
    date: str
    message: str
    tree: str
    """Tree id after it."""


def export(loaded: Stack, history: History, release: str) -> list[bytes]:
    """The mails, in order; `release` is the tree id of the recorded base."""
    built = history.build(release, loaded.base, loaded.patches)
    # What a build makes is in the sdist, but in no git.
    given_way = [path for path in history.files(release) if loaded.base.gives_way(path)]
    base = history.without(release, history.ignored(release, given_way))
    steps = _steps(loaded, history, base, built.commits)
    mails, before = [], base
    for number, step in enumerate(steps, 1):
        diff = history.raw_diff(before, step.tree, "--binary")
        mails.append(_mail(step, diff, f"{number}/{len(steps)}"))
        before = step.tree
    return mails


def _without(history: History, tree_id: str, paths: Iterable[str]) -> str:
    paths = tuple(paths)
    return history.without(
        tree_id,
        [
            path
            for path in history.files(tree_id)
            if path in paths
            or any(it.endswith("/") and path.startswith(it) for it in paths)
        ],
    )


def _steps(
    loaded: Stack, history: History, base: str, commits: list[str]
) -> list[_Step]:
    """Own files first, since patches call them: packaging, package; then patches."""
    last = loaded.patches[-1] if loaded.patches else None
    author, date = (last.author, last.date) if last else (_PERSON, _DATE)
    own = {path: _own(loaded, history, path) for path in loaded.own}
    steps = []
    current = base
    for subject, packaging in (
        ("Install the tree of the fork as it lies", True),
        ("Add the own files of the fork", False),
    ):
        removes = [it for it in loaded.base.removes if _packages(it.path) == packaging]
        replaces = [
            it for it in loaded.base.replaces if _packages(it.path) == packaging
        ]
        blobs = {path: it for path, it in own.items() if _packages(path) == packaging}
        after = _without(history, current, [it.path for it in removes])
        after = history.with_blobs(after, blobs)
        if after != current:
            message = _reasons(subject, blobs, replaces, removes)
            steps.append(_Step(author, date, message, after))
        current = after
    for patch, before, after in zip(
        loaded.patches, commits[:-1], commits[1:], strict=True
    ):
        current = _patched(history, current, patch, before, after)
        steps.append(_Step(patch.author, patch.date, patch.message, current))
    return steps


def _packages(path: str) -> bool:
    """Whether a path is about building and installing, not of the package."""
    return not path.startswith(PACKAGE) or path == checks.VERSION_FILE


def _own(loaded: Stack, history: History, path: str) -> tuple[str, str]:
    place = loaded.places.tree / path
    if not place.is_file():
        raise StackError(f"own file vllm/{path} is missing: restore it from git")
    mode = "100755" if place.stat().st_mode & 0o100 else "100644"
    return mode, history.store(place.read_bytes())


def _reasons(
    subject: str,
    blobs: Mapping[str, tuple[str, str]],
    replaces: list[Pin],
    removes: list[Pin],
) -> str:
    known = {it.path for it in replaces}
    parts = [
        [f"{it.path} takes upstream's place: {it.why}" for it in replaces],
        [f"{it.path} goes: {it.why}" for it in removes],
        [f"{path} is new" for path in blobs if path not in known],
    ]
    body = "\n\n".join("\n".join(lines) for lines in parts if lines)
    return f"{subject}\n\n{body}\n"


def _patched(
    history: History, tree_id: str, patch: Patch, before: str, after: str
) -> str:
    files = history.files(after)
    if history.files(before) == files:
        return tree_id
    return history.with_blobs(tree_id, {path: files[path] for path in patch.touches})


def _mail(step: _Step, diff: bytes, number: str) -> bytes:
    subject, _, body = step.message.partition("\n")
    content = body.strip("\n").encode() + b"\n---\n\n" + diff
    encoding = "8bit"
    # A mailbox is split with its carriage returns dropped, and long ago mail was
    # seven bits wide: what plain text could lose is wrapped.
    if b"\r" in content or any(
        line.startswith((b"From ", b">From ")) for line in content.split(b"\n")
    ):
        encoding, content = "base64", base64.encodebytes(content)
    name, address = parseaddr(step.author)
    head = (
        f"{MAGIC}\nFrom: {formataddr((name, address))}\nDate: {step.date}\n"
        f"Subject: {_header(f'[PATCH {number}] {subject}')}\nMIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        f"Content-Transfer-Encoding: {encoding}\n\n"
    )
    return head.encode() + content + b"\n"


def _header(text: str) -> str:
    return text if text.isascii() else Header(text, "utf-8", maxlinelen=200).encode()
