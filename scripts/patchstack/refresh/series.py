"""The series as a whole: patches taken out, moved, put right, taken from elsewhere.

Each is the series carried onto its own base, three ways as a rebase does it, and
sealed anew.  What is in conflict is told; nothing is written then.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import git
from ..errors import StackError, some
from ..files import write
from ..rebase import carry
from ..rebase.accept import write_and_apply
from ..rebase.carry import Carried, Choices, Outcome, Target
from ..stack import Stack, rewrite
from ..stack import patch as format_
from ..stack.patch import Patch
from ..tree.make import Wanted
from . import ready, words
from .paths import inside
from .words import Words


def reseal(stack: Stack) -> list[str]:
    """Put patches right that were edited by hand, merged or reordered."""
    return _carry(stack, stack.patches, f"scripts/rebase.sh {stack.base.version}")


def drop(stack: Stack, topics: Sequence[str]) -> list[str]:
    """Take patches out; each is kept, with its words, in `.dropped/`."""
    gone = [stack.find(topic) for topic in topics]
    options = "".join(f" --drop {patch.topic}" for patch in gone)
    series = [patch for patch in stack.patches if patch not in gone]
    done = _carry(stack, series, f"scripts/rebase.sh {stack.base.version}{options}")
    stack.places.dropped.mkdir(exist_ok=True)
    for patch in gone:
        write(stack.places.dropped / patch.name, patch.data)
        done.append(
            f"patches/{patch.name}: taken out; to have it back: scripts/refresh.sh "
            f"--import .dropped/{patch.name}"
        )
    return done


def move(stack: Stack, topic: str, before: str | None) -> list[str]:
    """Move a patch before another one, or to the end."""
    moved = stack.find(topic)
    series = [patch for patch in stack.patches if patch != moved]
    at = series.index(stack.find(before)) if before else len(series)
    series.insert(at, moved)
    by_hand = (
        f"order patches/series by hand, then scripts/rebase.sh {stack.base.version}"
    )
    done = _carry(stack, series, by_hand)
    return [*done, f"patches/{moved.name}: patch {at + 1} of {len(series)}"]


def take(
    stack: Stack, file: Path, topic: str | None, only: Sequence[str], said: Words
) -> list[str]:
    """Take a patch from elsewhere as the last: any mail or diff that git writes.

    With `only`, just its edits of these files.
    """
    chosen = {inside(stack.places, path) for path in only}
    taken = _read(stack, file, topic, chosen, said)
    if taken.topic in {it.topic for it in stack.patches}:
        raise StackError(
            f"there is a patch {taken.topic!r} already: name another TOPIC"
        )
    by_hand = f"make the edit in vllm/, then scripts/refresh.sh {taken.topic}"
    return _carry(stack, [*stack.patches, taken], by_hand)


def _carry(stack: Stack, series: Sequence[Patch], remedy: str) -> list[str]:
    tree = ready(stack)
    marker = tree.marker
    assert marker
    tree.refuse_edits(stack.own)
    version = stack.base.version
    to = Target(stack.base, marker.release, version, version)
    with tree.history.unchanged() as history:
        carried = carry.carry(history, series, to, Choices())
    stuck = [it for it in carried if it.outcome == Outcome.CONFLICT]
    if stuck:
        where = [f"{it.old.name} on {file.path}" for it in stuck for file in it.files
                 if file.outcome == Outcome.CONFLICT]  # fmt: skip
        raise StackError(
            f"in conflict: {some(where)}; nothing was written: settle it: {remedy}"
        )
    patches = [it.new for it in carried if it.new]
    files = rewrite.changes(stack, patches, stack.base)
    write_and_apply(stack, files, Wanted(marker.machine))
    return _told(stack, carried)


def _told(stack: Stack, carried: Sequence[Carried]) -> list[str]:
    before = {it.name: it.data for it in stack.patches}
    done = []
    for it in carried:
        if it.new is None:
            done.append(f"patches/{it.old.name}: dropped, nothing is left of its edit")
        elif it.new.data != before.get(it.new.name):
            kind = "resealed" if it.new.name in before else "new"
            done.append(f"patches/{it.new.name}: {kind}, {it.outcome}")
    return done


def _read(
    stack: Stack, file: Path, topic: str | None, chosen: set[str], said: Words
) -> Patch:
    """A patch of any form, in ours; raises `StackError` for words that it lacks."""
    try:
        data = file.read_bytes()
    except OSError as fault:
        raise StackError(f"--import {file}: {fault.strerror}") from None
    head, body, diff = ({}, "", data) if data.startswith(b"diff ") else _mail(data)
    if b"diff --git " not in diff:
        raise StackError(f"--import {file}: neither a mail of git's nor a diff")
    subject = said.subject or head.get("Subject", "")
    name = topic or re.sub(r"^\d+-", "", file.stem.lower())
    blank = words.draft(stack.places, name)
    patch = replace(
        blank,
        author=f"{head['Author']} <{head['Email']}>" if head else blank.author,
        date=head.get("Date", blank.date),
        message=f"{subject}\n\n{body}".rstrip() + "\n" if head else blank.message,
    )
    patch = words.complete(stack.places, words.reworded(patch, said))
    # The line with git's version closes a mail.
    diff = re.sub(rb"\n-- \n[^\n]*\n*\Z", b"\n", diff)
    parts = re.split(rb"^(?=diff --git )", diff, flags=re.MULTILINE)[1:]
    if chosen:
        heads = {path: f"diff --git a/{path} b/{path}\n".encode() for path in chosen}
        missing = [path for path, it in heads.items() if it not in diff]
        if missing:
            raise StackError(f"--import {file} does not edit {some(missing)}")
        parts = [it for it in parts if it.startswith(tuple(heads.values()))]
    files = format_.parse_diff(f"--import {file}", b"".join(parts))
    return replace(patch, files=files)


def _mail(data: bytes) -> tuple[dict[str, str], str, bytes]:
    """What git reads in a mail: its headers, the text, the diff."""
    with tempfile.TemporaryDirectory() as temporary:
        text, diff = (Path(temporary) / name for name in ("text", "diff"))
        command = ["git", "mailinfo", "-b", "--encoding=UTF-8", str(text), str(diff)]
        try:
            out = git.call(command, git.clean_environment(), data)
        except git.GitError:
            return {}, "", b""
        lines = out.decode().splitlines()
        head = dict(line.partition(": ")[::2] for line in lines if line)
        return head, text.read_text(), diff.read_bytes()
