"""The words of a patch: what the user gives, and what it had before."""

import datetime
import email.utils
import textwrap
from dataclasses import dataclass, field, replace

from .. import git
from ..errors import StackError
from ..stack import Places
from ..stack import patch as format_
from ..stack.patch import TRAILERS, Patch

_EXAMPLE = (
    'scripts/refresh.sh {topic} --subject "Compare FlashInfer by release" '
    '--why "a post release switched it off" --upstream-status none '
    "--drop-when tests/x.py::test_y --tests tests/x.py"
)


@dataclass(frozen=True)
class Words:
    """What the user says of a patch; None for what stays."""

    subject: str | None = None
    body: str | None = None
    author: str | None = None
    trailers: dict[str, str | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether anything is said."""
        return any((self.subject, self.body, self.author, *self.trailers.values()))


def reworded(patch: Patch, words: Words) -> Patch:
    """Return the patch with what the words say in place of its own."""
    given = {key: _wrapped(it) for key, it in words.trailers.items() if it}
    text = format_.message(
        words.subject or patch.subject,
        patch.body if words.body is None else words.body.strip(),
        patch.trailers | given,
    )
    author = patch.author if words.author is None else _checked(words.author)
    if (text, author) == (patch.message, patch.author):
        return patch
    return replace(patch, message=text, author=author)


def draft(places: Places, topic: str) -> Patch:
    """Return a patch without a diff; one that was dropped has its old words."""
    format_.check_topic(topic)
    dropped = places.dropped / f"{topic}.patch"
    if dropped.is_file():
        found = format_.parse(dropped.name, dropped.read_bytes())
        return replace(found, files=(), data=b"")
    now = email.utils.format_datetime(datetime.datetime.now(datetime.UTC))
    return Patch(topic, "", now, "", ())


def complete(places: Places, patch: Patch) -> Patch:
    """Return a new patch with an author; raises `StackError` for words it lacks."""
    lacking = [f"--{key.lower()}" for key in TRAILERS if not patch.trailers.get(key)]
    lacking += [] if patch.subject else ["--subject"]
    if lacking:
        raise StackError(
            f"the new patch {patch.topic!r} needs {' '.join(lacking)}, for example: "
            + _EXAMPLE.format(topic=patch.topic)
        )
    if patch.author:
        return patch
    author = git.user_identity(places.repo)
    if author is None:
        raise StackError(
            f"the new patch {patch.topic!r} needs --author 'NAME <ADDRESS>', or "
            "user.name and user.email in git's configuration"
        )
    return replace(patch, author=author)


def _checked(author: str) -> str:
    name, address = email.utils.parseaddr(author)
    if not name or "@" not in address:
        raise StackError(f"--author {author!r}: give it as 'NAME <ADDRESS>'")
    return author


def _wrapped(value: str) -> str:
    # Names of tests and files stay in one piece.
    fold = textwrap.TextWrapper(72, break_long_words=False, break_on_hyphens=False).wrap
    return "\n".join(line for part in value.splitlines() for line in fold(part))
