"""The dependency list of the fork's own `pyproject.toml`.  Pure; text in, text out."""

import re
import tomllib
from collections.abc import Iterable

from ..errors import StackError

FILE = "pyproject.toml"
_LIST = re.compile(r"^dependencies = \[\n(.*?)^\]$", re.MULTILINE | re.DOTALL)


def rewritten(text: str, added: Iterable[str], removed: Iterable[str]) -> str:
    """Return the text with the release's requirements as another release states them.

    A new requirement takes the place of one of that name that goes; the fork's own
    requirements and all comments stay.
    """
    news, gone = list(added), set(removed)
    found = _LIST.search(text)
    lines = []
    for line in found[1].splitlines() if found else ():
        stated = None if line.lstrip().startswith("#") else _stated(line)
        if stated not in gone:
            lines.append(line)
            continue
        heir = next((it for it in news if _name(it) == _name(stated)), None)
        if heir is not None:
            news.remove(heir)
            lines.append(_line(heir))
    lines += map(_line, news)
    if found:
        body = "".join(f"{line}\n" for line in lines)
        text, old = text[: found.start(1)] + body + text[found.end(1) :], text
        if _listed(text) == (_listed(old) - gone).union(added):
            return text
    raise StackError(
        f"the dependencies of vllm/{FILE} are not a list with one a line: put them "
        "back into that form (git log -p vllm/pyproject.toml)"
    )


def _listed(text: str) -> set[str]:
    return set(tomllib.loads(text)["project"]["dependencies"])


def _stated(line: str) -> str | None:
    try:
        values = tomllib.loads(f"it = [{line}\n]")["it"]
    except tomllib.TOMLDecodeError:
        return None
    return values[0] if values else None


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _line(requirement: str) -> str:
    quote = "'" if '"' in requirement else '"'
    return f"    {quote}{requirement}{quote},"
