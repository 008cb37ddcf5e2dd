"""The patch format: a mail of `git format-patch` with four trailers of ours.

    Why: the reason
    Upstream-status: none | filed WHERE | merged in VERSION
    Drop-when: what passes on a pristine newer base once the patch is obsolete
    Tests: what guards it

A value may go on in indented lines.  git writes the mails (`History.mail`); here they
are read, without git, and their wording is checked.  A diff names the exact texts that
it leads from and to by git's blob ids.  Its hunk headers end with the second `@@`:
what git adds would quote upstream and depends on git's version.
"""

import re
from dataclasses import dataclass
from email import message_from_string
from email.header import decode_header, make_header
from functools import cached_property

from ..errors import StackError

TRAILERS = ("Why", "Upstream-status", "Drop-when", "Tests")
SUBJECT_WIDTH = 72

_TOPIC = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_STATUS = re.compile(r"none|filed( \S.*)?|merged in \S.*", re.DOTALL)
_FILE = re.compile(
    rb"diff --git a/(?P<path>[^\n]+) b/(?P=path)\n"
    rb"index (?P<before>[0-9a-f]{4,40})\.\.(?P<after>[0-9a-f]{4,40}) "
    rb"(?P<mode>100644|100755)\n"
    rb"--- a/(?P=path)\t?\n\+\+\+ b/(?P=path)\t?\n(?P<hunks>@@ .*)",
    re.DOTALL,
)
_TRAILER = r"[A-Z][A-Za-z-]*:(?: .*)?(?:\n[ \t]+\S.*)*"
_BLOCK = re.compile(rf"(?:\A|\n\n)({_TRAILER}(?:\n{_TRAILER})*)\s*\Z")
_HUNK = re.compile(rb"@@ -\d+(?:,\d+)? \+(\d+)")


class PatchFormatError(StackError):
    """The text is no patch of this format."""


@dataclass(frozen=True)
class FileDiff:
    """The edit of one upstream file: `before` and `after` are git blob ids."""

    path: str
    before: str
    after: str
    mode: str
    diff: bytes

    @property
    def hunks(self) -> bytes:
        """The diff from its first hunk on."""
        return self.diff[self.diff.index(b"\n@@ ") + 1 :]

    @property
    def added(self) -> set[int]:
        """Line numbers, in the edited text, of the lines that the edit adds."""
        numbers, at = set(), 0
        for line in self.hunks.split(b"\n"):
            if found := _HUNK.match(line):
                at = int(found[1])
            elif line[:1] in (b"+", b" "):
                if line[:1] == b"+":
                    numbers.add(at)
                at += 1
        return numbers


@dataclass(frozen=True)
class Patch:
    """A patch file, read."""

    topic: str
    author: str
    """`Name <address>`."""
    date: str
    """As in a mail: `Sun, 29 Nov 2026 18:00:00 +0000`."""
    message: str
    """Subject, body and trailers, as a commit has them."""
    files: tuple[FileDiff, ...]
    data: bytes = b""
    """The file's content; nothing for a patch that is still to be written."""

    @property
    def name(self) -> str:
        """The file's name in `patches/`."""
        return f"{self.topic}.patch"

    @property
    def touches(self) -> list[str]:
        """The upstream files that it edits."""
        return [file.path for file in self.files]

    @property
    def quoted(self) -> int:
        """Upstream lines in it: context and removed ones."""
        lines = (line for file in self.files for line in file.hunks.split(b"\n"))
        return sum(line[:1] in (b" ", b"-") for line in lines)

    @property
    def subject(self) -> str:
        """The first line of the message."""
        return self.message.partition("\n")[0]

    @property
    def body(self) -> str:
        """The message without its subject and trailers; may be empty."""
        return _BLOCK.sub("", self.message).partition("\n")[2].strip()

    @cached_property
    def trailers(self) -> dict[str, str]:
        """The message's trailers; a value's lines are joined by line feeds."""
        found = _BLOCK.search(self.message)
        lines = re.findall(_TRAILER, found[1]) if found else []
        pairs = (line.split(":", 1) for line in lines)
        return {key: re.sub(r"\n[ \t]+", "\n", it).strip() for key, it in pairs}


def message(subject: str, body: str, trailers: dict[str, str]) -> str:
    """Return the message of these parts, with our trailers last and in order."""
    order = [key for key in trailers if key not in TRAILERS]
    order += [key for key in TRAILERS if trailers.get(key)]
    lines = (f"{key}: " + trailers[key].replace("\n", "\n ") for key in order)
    parts = (subject, *filter(None, (body, "\n".join(lines))))
    return "\n\n".join(parts) + "\n"


def check_topic(topic: str) -> None:
    """Raise `PatchFormatError` for what cannot name a patch."""
    if not _TOPIC.fullmatch(topic):
        raise PatchFormatError(
            f"patches/{topic}.patch: name it TOPIC.patch (lower case, digits, dashes)"
        )


def parse(name: str, data: bytes) -> Patch:
    """Read a patch file; raises `PatchFormatError` for what is none."""
    topic = name.removesuffix(".patch")
    check_topic(topic)
    where = f"patches/{name}"
    if b"\r\n" in data[:200]:
        raise PatchFormatError(
            f"{where} has CRLF line ends, so git converted it on checkout: check it "
            "out again with core.autocrlf=false"
        )
    if re.search(rb"^(<{7}|>{7}) ", data, re.MULTILINE):
        raise PatchFormatError(
            f"{where} has the conflict markers of a merge: settle them (of two index "
            "lines keep either), then scripts/refresh.sh --reseal"
        )
    cut = data.find(b"\ndiff --git ")
    if cut < 0:
        raise PatchFormatError(f"{where} has no diff")
    try:
        mail = message_from_string(data[:cut].decode())
    except UnicodeDecodeError:
        raise PatchFormatError(f"{where}: the message is not UTF-8") from None
    missing = [key for key in ("From", "Date", "Subject") if not mail[key]]
    if not data.startswith(b"From ") or missing:
        raise PatchFormatError(
            f"{where} is not a git format-patch mail: "
            + (f"it has no {missing[0]}: line" if missing else "no From line first")
        )
    author, subject = (_decoded(mail[key]) for key in ("From", "Subject"))
    text = re.sub(r"^\[PATCH[^]]*\] ", "", subject) + f"\n\n{mail.get_payload()}"
    return Patch(
        topic,
        author,
        mail["Date"],
        re.sub(r"\n---\n.*", "", text, flags=re.DOTALL).rstrip() + "\n",
        parse_diff(where, data[cut + 1 :]),
        data,
    )


def _decoded(value: str) -> str:
    return str(make_header(decode_header(re.sub(r"\n[ \t]+", " ", value))))


def parse_diff(where: str, diff: bytes) -> tuple[FileDiff, ...]:
    """Return the files of a diff; anything but edits of text is an error."""
    files = []
    for part in re.split(rb"^(?=diff --git )", diff, flags=re.MULTILINE)[1:]:
        found = _FILE.fullmatch(part)
        if found is None:
            head = [line.decode(errors="replace") for line in part.split(b"\n")[:2]]
            raise PatchFormatError(
                f"{where}: {head[0]!r}, {head[1]!r} is not the edit of a text that is "
                "there: put new files into the tree as own files, list removed ones in "
                "upstream.toml"
            )
        path, before, after, mode = (
            found[key].decode() for key in ("path", "before", "after", "mode")
        )
        files.append(FileDiff(path, before, after, mode, part))
    return tuple(files)


def lint(patch: Patch, budget: int) -> list[str]:
    """Return the faults of a patch's wording and size, each a sentence.

    `budget` is in upstream lines.
    """
    faults = [f"no {key}: line" for key in TRAILERS if not patch.trailers.get(key)]
    status = patch.trailers.get("Upstream-status", "none")
    if not _STATUS.fullmatch(status):
        faults.append(
            f"Upstream-status is {status!r}: say none, filed WHERE or merged in VERSION"
        )
    subject = patch.subject
    if len(subject) > SUBJECT_WIDTH or not re.match(r"[A-Z\[]", subject):
        faults.append(
            f"the subject must start with a capital and fit {SUBJECT_WIDTH} columns"
        )
    if subject.endswith("."):
        faults.append("the subject ends with a full stop")
    if patch.quoted > budget:
        faults.append(
            f"quotes {patch.quoted} upstream lines, its budget is {budget}: "
            "move logic into an own file, or state a [[budget]] in upstream.toml"
        )
    return [f"patches/{patch.name}: {fault}" for fault in faults]
