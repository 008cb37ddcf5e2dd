"""The patch format: parsing, writing, lint.  Pure; text in, text out.

A patch is what `git format-patch --zero-commit --full-index --no-signature
--no-stat` writes, with five header lines at the end of its message:

    Why: the reason
    Upstream-status: none | filed WHERE | merged in VERSION
    Drop-when: what passes on a pristine newer base once the patch is obsolete
    Touches: the upstream files it edits, one a line
    Tests: what guards it

A value may go on in indented lines.  The part of a hunk header behind the
second `@@` is left out: it would quote upstream and depends on git's version.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from .errors import StackError

HEADERS = ("Why", "Upstream-status", "Drop-when", "Touches", "Tests")
CONTEXT = 3
SUBJECT_WIDTH = 72

_NAME = re.compile(r"(\d{4})-([a-z0-9]+(?:-[a-z0-9]+)*)\.patch")
_STATUS = re.compile(r"none|filed( \S.*)?|merged in \S.*", re.DOTALL)
MAGIC = "From " + "0" * 40 + " Mon Sep 17 00:00:00 2001"
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40}) (100644|100755)")


class PatchFormatError(StackError):
    """The text is no patch of this format."""


@dataclass(frozen=True)
class Hunk:
    old_start: int
    new_start: int
    heading: bytes
    lines: tuple[bytes, ...]
    """Without line feeds, each with its leading ` `, `-`, `+` or a backslash."""

    def quoted(self) -> int:
        """Upstream lines it quotes: context and removed."""
        return sum(line[:1] in (b" ", b"-") for line in self.lines)

    def widest_context(self) -> int:
        """Most lines of context on one side of a change."""
        kinds = [line[:1] for line in self.lines if line[:1] != b"\\"]
        changed = [at for at, kind in enumerate(kinds) if kind != b" "]
        if not changed:
            return len(kinds)
        # Two neighbouring changes share the lines between them.
        shared = [(b - a) // 2 for a, b in pairwise(changed)]
        return max(changed[0], len(kinds) - 1 - changed[-1], *shared)

    def to_bytes(self) -> bytes:
        old = sum(line[:1] in (b" ", b"-") for line in self.lines)
        new = sum(line[:1] in (b" ", b"+") for line in self.lines)
        span = f"@@ -{_span(self.old_start, old)} +{_span(self.new_start, new)} @@"
        return b"\n".join((span.encode(), *self.lines)) + b"\n"


@dataclass(frozen=True)
class FileDiff:
    """The edit of one upstream file: `before` and `after` are git blob ids."""

    path: str
    before: str
    after: str
    mode: str
    hunks: tuple[Hunk, ...]

    def misfit(self, text: bytes) -> int | None:
        """Line of the first hunk that is not exactly where it says, if any."""
        lines = text.split(b"\n")
        for hunk in self.hunks:
            old = [line[1:] for line in hunk.lines if line[:1] in (b" ", b"-")]
            # A hunk that only adds names the line before it.
            start = hunk.old_start - 1 if old else hunk.old_start
            if lines[start : start + len(old)] != old:
                return hunk.old_start
        return None

    def to_bytes(self) -> bytes:
        # git ends a name with a tab when the name holds a space.
        tab = "\t" if " " in self.path else ""
        head = (
            f"diff --git a/{self.path} b/{self.path}\n"
            f"index {self.before}..{self.after} {self.mode}\n"
            f"--- a/{self.path}{tab}\n+++ b/{self.path}{tab}\n"
        )
        return head.encode() + b"".join(hunk.to_bytes() for hunk in self.hunks)


@dataclass(frozen=True)
class Patch:
    number: int
    topic: str
    author: str
    """`Name <address>`."""
    date: str
    """As in a mail: `Sun, 29 Nov 2026 18:00:00 +0000`."""
    subject: str
    body: str
    """Free text between the subject and the header lines; may be empty."""
    headers: dict[str, str]
    files: tuple[FileDiff, ...]

    @property
    def name(self) -> str:
        return f"{self.number:04}-{self.topic}.patch"

    @property
    def touches(self) -> list[str]:
        return [file.path for file in self.files]

    @property
    def quoted(self) -> int:
        return sum(hunk.quoted() for file in self.files for hunk in file.hunks)

    @property
    def message(self) -> str:
        """The commit message: subject, body, header lines."""
        parts = [self.subject]
        if self.body:
            parts.append(self.body)
        parts.append(
            "\n".join(
                f"{key}: " + self.headers[key].replace("\n", "\n ")
                for key in HEADERS
                if key in self.headers
            )
        )
        return "\n\n".join(parts) + "\n"

    def diff(self) -> bytes:
        return b"".join(file.to_bytes() for file in self.files)

    def to_bytes(self) -> bytes:
        _, _, rest = self.message.partition("\n")
        head = (
            f"{MAGIC}\nFrom: {self.author}\nDate: {self.date}\n"
            f"Subject: [PATCH] {self.subject}\n{rest}\n"
        )
        return head.encode() + self.diff()

    def with_files(self, files: Iterable[FileDiff]) -> "Patch":
        """The patch with another diff, and `Touches` to match."""
        files = tuple(files)
        touches = "\n".join(file.path for file in files)
        return replace(self, files=files, headers=self.headers | {"Touches": touches})


def split_name(name: str) -> tuple[int, str]:
    """Number and topic of a patch's file name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise PatchFormatError(
            f"patches/{name}: name it NNNN-topic.patch (lower case, digits, dashes)"
        )
    return int(found[1]), found[2]


def parse(name: str, data: bytes) -> Patch:
    """Read a patch file; raises `PatchFormatError` for what is none."""
    number, topic = split_name(name)
    if b"\r\n" in data[:200]:
        raise PatchFormatError(
            f"patches/{name} has CRLF line ends, so git converted it on checkout: "
            "check it out again with core.autocrlf=false"
        )
    cut = data.find(b"\ndiff --git ")
    if cut < 0:
        raise PatchFormatError(f"patches/{name} has no diff")
    try:
        text = data[: cut + 1].decode()
    except UnicodeDecodeError:
        raise PatchFormatError(f"patches/{name}: the message is not UTF-8") from None
    mail, _, message = text.partition("\n\n")
    first, *fields = re.sub(r"\n[ \t]+", " ", mail).split("\n")
    values = dict(line.partition(": ")[::2] for line in fields)
    missing = [key for key in ("From", "Date", "Subject") if not values.get(key)]
    if not first.startswith("From ") or missing:
        raise PatchFormatError(
            f"patches/{name} is not a git format-patch mail: "
            + (f"it has no {missing[0]}: line" if missing else "no From line first")
        )
    body, headers = _split_message(message)
    return Patch(
        number,
        topic,
        author=values["From"],
        date=values["Date"],
        subject=re.sub(r"^\[PATCH[^]]*\] ", "", values["Subject"]),
        body=body,
        headers=headers,
        files=tuple(parse_diff(f"patches/{name}", data[cut + 1 :])),
    )


def _split_message(message: str) -> tuple[str, dict[str, str]]:
    body: list[str] = []
    headers: dict[str, str] = {}
    key = None
    for line in message.rstrip().split("\n"):
        word, colon, value = line.partition(":")
        if colon and word in HEADERS:
            key = word
            headers[key] = value.strip()
        elif key and line[:1] in (" ", "\t"):
            headers[key] = f"{headers[key]}\n{line.strip()}".strip()
        elif line != "---":
            key = None
            body.append(line)
    return "\n".join(body).strip(), headers


def parse_diff(where: str, diff: bytes) -> list[FileDiff]:
    """Files of a diff; anything but edits of existing files is an error."""
    files: list[FileDiff] = []
    lines = diff.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    at = 0
    while at < len(lines):
        at, file = _parse_file(where, lines, at)
        files.append(file)
    return files


def _parse_file(where: str, lines: list[bytes], at: int) -> tuple[int, FileDiff]:
    def fail(why: str) -> PatchFormatError:
        return PatchFormatError(f"{where}, line {at + 1} of the diff: {why}")

    def take(start: bytes) -> bytes:
        nonlocal at
        if at >= len(lines) or not lines[at].startswith(start):
            found = lines[at].decode(errors="replace") if at < len(lines) else "the end"
            raise fail(f"expected {start.decode()!r}, found {found[:60]!r}")
        at += 1
        return lines[at - 1][len(start) :]

    names = take(b"diff --git a/")
    path = names[: (len(names) - 3) // 2]
    if names != path + b" b/" + path:
        raise fail("a patch neither renames a file nor quotes its name")
    if at < len(lines) and not lines[at].startswith(b"index "):
        raise fail(
            f"a patch only edits files that are there, not "
            f"{lines[at].decode(errors='replace')!r}: put new files into the tree as "
            "own files, list removed ones in upstream.toml"
        )
    ids = _INDEX.fullmatch(lines[at] if at < len(lines) else b"")
    if ids is None:
        raise fail("the index line needs full blob ids and a file mode (--full-index)")
    at += 1
    for side in (b"--- a/", b"+++ b/"):
        if take(side).rstrip(b"\t") != path:
            raise fail(f"the {side[:3].decode()} line names another file")
    hunks = []
    while at < len(lines) and (found := _HUNK.fullmatch(lines[at])):
        at, hunk = _parse_hunk(where, lines, at, found)
        hunks.append(hunk)
    if not hunks:
        raise fail("no hunk")
    before, after, mode = (part.decode() for part in ids.groups())
    return at, FileDiff(path.decode(), before, after, mode, tuple(hunks))


def _parse_hunk(
    where: str, lines: list[bytes], at: int, found: re.Match[bytes]
) -> tuple[int, Hunk]:
    old, new = (int(n) if n is not None else 1 for n in (found[2], found[4]))
    first = at = at + 1
    while at < len(lines) and (old or new or lines[at][:1] == b"\\"):
        kind = lines[at][:1]
        if kind not in (b" ", b"-", b"+", b"\\"):
            break
        old -= kind in (b" ", b"-")
        new -= kind in (b" ", b"+")
        at += 1
    if old or new:
        raise PatchFormatError(
            f"{where}, line {first} of the diff: the hunk is shorter or longer than "
            "its @@ line says"
        )
    return at, Hunk(
        int(found[1]), int(found[3]), found[5].strip(), tuple(lines[first:at])
    )


def _span(start: int, count: int) -> str:
    return f"{start}" if count == 1 else f"{start},{count}"


def lint(patch: Patch, data: bytes, budget: int) -> list[str]:
    """Faults of a patch file, each a sentence; `budget` is in upstream lines."""
    faults = [f"no {key}: line" for key in HEADERS if not patch.headers.get(key)]
    status = patch.headers.get("Upstream-status", "none")
    if not _STATUS.fullmatch(status):
        faults.append(
            f"Upstream-status is {status!r}: say none, filed WHERE or merged in VERSION"
        )
    if patch.headers.get("Touches", "").splitlines() != patch.touches:
        faults.append(
            "Touches lists other files than the diff: " + " ".join(patch.touches)
        )
    if len(patch.subject) > SUBJECT_WIDTH or not patch.subject[:1].isupper():
        faults.append(
            f"the subject must start with a capital and fit {SUBJECT_WIDTH} columns"
        )
    if patch.subject.endswith("."):
        faults.append("the subject ends with a full stop")
    hunks = [hunk for file in patch.files for hunk in file.hunks]
    if any(hunk.widest_context() > CONTEXT for hunk in hunks):
        faults.append(f"a hunk has more than {CONTEXT} lines of context")
    if any(hunk.heading for hunk in hunks):
        faults.append("a hunk header quotes upstream behind @@: run scripts/refresh.sh")
    elif not faults and data != patch.to_bytes():
        faults.append("not in the form that scripts/refresh.sh writes: run it")
    if patch.quoted > budget:
        faults.append(
            f"quotes {patch.quoted} upstream lines, its budget is {budget}: "
            "move logic into an own file, or state a [[budget]] in upstream.toml"
        )
    return [f"patches/{patch.name}: {fault}" for fault in faults]
