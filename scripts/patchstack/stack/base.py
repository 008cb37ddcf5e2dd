"""The base: `upstream.toml`, the pins of the upstream release."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StackError
from ..files import read_text

FILE = "upstream.toml"
DEFAULT_BUDGET = 40
_HEAD = """\
# The upstream release that the stack is made for, as scripts/refresh.sh and
# scripts/rebase.sh write it.  Paths are those of its source tree, which lies in vllm/
# here; a sha256 is of the release's own file, that of a folder (a path with a trailing
# slash) is of its listing, one "SHA256  PATH" a line.
"""
_REPLACES = "# Upstream files whose place an own file takes.\n"
_REMOVES = "# Upstream files that must not be in the tree.\n"
_BUDGETS = f"# Patches that may quote more than {DEFAULT_BUDGET} lines of upstream.\n"


@dataclass(frozen=True)
class Archive:
    """A release file by name and content."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Pin:
    """An upstream path that gives way to us; see `files.path_sha256` for folders."""

    path: str
    sha256: str
    why: str


@dataclass(frozen=True)
class Budget:
    """A patch that may quote more upstream lines than the default."""

    patch: str
    lines: int
    why: str


@dataclass(frozen=True)
class Base:
    """The release, and what of it gives way to us."""

    version: str
    sdist: Archive
    wheels: Mapping[str, Archive]
    replaces: tuple[Pin, ...] = ()
    removes: tuple[Pin, ...] = ()
    budgets: tuple[Budget, ...] = field(default=())

    def wheel(self, machine: str) -> Archive:
        """Return the pinned wheel of an architecture of `platform.machine()`."""
        try:
            return self.wheels[machine]
        except KeyError:
            known = ", ".join(self.wheels)
            raise StackError(
                f"no release wheel for {machine!r}: vLLM {self.version} has {known}"
            ) from None

    def budget(self, topic: str) -> int:
        """Return how many upstream lines a patch may quote."""
        stated = {it.patch: it.lines for it in self.budgets}
        return stated.get(topic, DEFAULT_BUDGET)

    def gives_way(self, path: str) -> bool:
        """Whether the stack does without this upstream file."""
        return any(
            path == pin.path or (pin.path.endswith("/") and path.startswith(pin.path))
            for pin in (*self.replaces, *self.removes)
        )


def load(repo: Path) -> Base:
    """Read `upstream.toml`; raises `StackError` if it is missing or misshaped."""
    path = repo / FILE
    try:
        return parse(read_text(path))
    except FileNotFoundError:
        raise StackError(f"{path} is missing: restore it from git") from None


def parse(text: str) -> Base:
    """Read the text of `upstream.toml`; raises `StackError` for what is none."""
    try:
        data = tomllib.loads(text)
        pins: dict[str, Any] = data["base"]
        return Base(
            version=pins["version"],
            sdist=Archive(**pins["sdist"]),
            wheels={machine: Archive(**it) for machine, it in pins["wheels"].items()},
            replaces=tuple(Pin(**it) for it in data.get("replaces", [])),
            removes=tuple(Pin(**it) for it in data.get("removes", [])),
            budgets=tuple(Budget(**it) for it in data.get("budget", [])),
        )
    except tomllib.TOMLDecodeError as fault:
        raise StackError(f"{FILE} is not valid TOML: {fault}") from None
    except (KeyError, TypeError, AttributeError) as fault:
        raise StackError(
            f"{FILE} lacks or misshapes an entry: {fault}: restore it from git"
        ) from None


def render(base: Base) -> str:
    """Return the text of `upstream.toml`; `parse` reads the same base from it."""
    wheels = [f"{machine} = {_archive(it)}\n" for machine, it in base.wheels.items()]
    parts = [
        f"{_HEAD}\n[base]\nversion = {_quoted(base.version)}\n"
        f"sdist = {_archive(base.sdist)}\n",
        "[base.wheels]\n" + "".join(wheels),
    ]
    for comment, table, entries in (
        (_REPLACES, "replaces", base.replaces),
        (_REMOVES, "removes", base.removes),
        (_BUDGETS, "budget", base.budgets),
    ):
        for at, entry in enumerate(entries):
            lines = (f"{key} = {_quoted(it)}\n" for key, it in vars(entry).items())
            parts.append(("" if at else comment) + f"[[{table}]]\n" + "".join(lines))
    return "\n".join(parts)


def rewritten(text: str, base: Base) -> str:
    """Return the text for `base` in place of `text`.

    Raises `StackError` where that would lose comments or entries that are ours not.
    """
    if base == parse(text):
        return text
    kept = {line for line in text.splitlines() if line.lstrip().startswith("#")}
    lost = kept.difference(render(parse(text)).splitlines())
    if lost:
        raise StackError(
            f"{FILE} has a comment that would be lost ({min(lost)!r}): move it into "
            "the why of an entry"
        )
    return render(base)


def _archive(archive: Archive) -> str:
    return f"{{ file = {_quoted(archive.file)}, sha256 = {_quoted(archive.sha256)} }}"


def _quoted(value: str | int) -> str:
    # A JSON string is one of TOML too, where nothing but DEL is left unescaped.
    return re.sub("\x7f", r"\\u007f", json.dumps(value, ensure_ascii=False))
