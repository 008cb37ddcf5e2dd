"""The base: `upstream.toml`, the pins of the upstream release."""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import StackError
from .files import read_text

FILE = "upstream.toml"
DEFAULT_BUDGET = 40


@dataclass(frozen=True)
class Archive:
    """A release file by name and content."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Pin:
    """An upstream path that gives way to us.

    A path with a trailing slash is a folder; its sha256 is that of its listing
    (see `folder_sha256`).
    """

    path: str
    sha256: str
    why: str


@dataclass(frozen=True)
class Budget:
    """A patch that may quote more upstream lines than the default."""

    lines: int
    why: str


@dataclass(frozen=True)
class Base:
    version: str
    sdist: Archive
    wheels: Mapping[str, Archive]
    touches: Mapping[str, str]
    replaces: tuple[Pin, ...] = ()
    removes: tuple[Pin, ...] = ()
    budgets: Mapping[str, Budget] = field(default_factory=dict)

    def wheel(self, machine: str) -> Archive:
        """The pinned wheel of an architecture, as `platform.machine()` names it."""
        try:
            return self.wheels[machine]
        except KeyError:
            known = ", ".join(self.wheels)
            raise StackError(
                f"no release wheel for {machine!r}: vLLM {self.version} has {known}"
            ) from None

    def budget(self, topic: str) -> int:
        """Upstream lines that a patch may quote."""
        found = self.budgets.get(topic)
        return found.lines if found else DEFAULT_BUDGET

    def gives_way(self, path: str) -> bool:
        """Whether the stack does without this upstream file."""
        return any(
            path == pin.path or (pin.path.endswith("/") and path.startswith(pin.path))
            for pin in (*self.replaces, *self.removes)
        )


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def folder_sha256(folder: Path) -> str:
    """sha256 of the folder's listing, one `SHA256  PATH` a line, sorted by path."""
    files = sorted(
        (path.relative_to(folder).as_posix(), path)
        for path in folder.rglob("*")
        if path.is_file()
    )
    listing = "".join(f"{file_sha256(path)}  {name}\n" for name, path in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def path_sha256(root: Path, path: str) -> str | None:
    """sha256 of a pinned file or folder below `root`; None if it is not there."""
    place = root / path
    if path.endswith("/"):
        return folder_sha256(place) if place.is_dir() else None
    return file_sha256(place) if place.is_file() else None


def load(repo: Path) -> Base:
    path = repo / FILE
    try:
        return parse(read_text(path))
    except FileNotFoundError:
        raise StackError(f"{path} is missing: restore it from git") from None


def parse(text: str) -> Base:
    """Read `upstream.toml`; raises `StackError` for what is none."""
    try:
        return _read(tomllib.loads(text))
    except tomllib.TOMLDecodeError as fault:
        raise StackError(f"{FILE} is not valid TOML: {fault}") from None
    except (KeyError, TypeError, AttributeError) as fault:
        raise StackError(
            f"{FILE} lacks or misshapes an entry: {fault}: restore it from git"
        ) from None


def _read(data: dict[str, Any]) -> Base:
    pins = data["base"]
    return Base(
        version=pins["version"],
        sdist=Archive(**pins["sdist"]),
        wheels={machine: Archive(**it) for machine, it in pins["wheels"].items()},
        touches=data.get("touches", {}),
        replaces=tuple(Pin(**it) for it in data.get("replaces", [])),
        removes=tuple(Pin(**it) for it in data.get("removes", [])),
        budgets={
            it["patch"]: Budget(it["lines"], it["why"]) for it in data.get("budget", [])
        },
    )


def with_touches(text: str, touches: Mapping[str, str]) -> str:
    """`upstream.toml` with its `[touches]` table replaced, all else as it was."""
    table = "[touches]\n" + "".join(
        f"{_quoted(path)} = {_quoted(digest)}\n"
        for path, digest in sorted(touches.items())
    )
    found = re.search(r"^\[touches\]\n(?:(?!\[|#).*\n)*", text, re.MULTILINE)
    if found is None:
        return text.rstrip("\n") + "\n\n" + table
    tail = text[found.end() :]
    return text[: found.start()] + table + ("\n" + tail if tail else "")


def with_replaced(text: str, pin: Pin) -> str:
    """`upstream.toml` with one more own file in an upstream file's place."""
    return text.rstrip("\n") + (
        f"\n\n[[replaces]]\npath = {_quoted(pin.path)}\n"
        f"sha256 = {_quoted(pin.sha256)}\nwhy = {_quoted(pin.why)}\n"
    )


def without_pin(text: str, path: str) -> str:
    """`upstream.toml` without the `[[replaces]]` or `[[removes]]` entry of `path`."""
    return _without_entry(text, "replaces|removes", "path", path)


def without_budget(text: str, topic: str) -> str:
    """`upstream.toml` without the `[[budget]]` entry of a patch."""
    return _without_entry(text, "budget", "patch", topic)


def _without_entry(text: str, tables: str, key: str, value: str) -> str:
    line = r"(?:[^\[#\n].*\n)*"
    name = re.escape(f"{key} = {_quoted(value)}\n")
    entry = re.compile(rf"^\[\[(?:{tables})\]\]\n{line}?{name}{line}\n?", re.MULTILINE)
    return entry.sub("", text, count=1).rstrip("\n") + "\n"


def with_release(
    text: str, version: str, sdist: Archive, wheels: Mapping[str, Archive]
) -> str:
    """`upstream.toml` for another release: its version, its sdist, its wheels."""
    values = {"version": _quoted(version), "sdist": _archive(sdist)}
    values |= {machine: _archive(wheel) for machine, wheel in wheels.items()}
    head, touches, tail = text.partition("[touches]\n")
    for key, value in values.items():
        line = re.compile(rf"^{re.escape(key)} = .*$", re.MULTILINE)
        # Backslashes of a replacement would be taken for references.
        stated = f"{key} = {value}".replace("\\", "\\\\")
        head = line.sub(stated, head, count=1)
    return head + touches + tail


def with_pin(text: str, path: str, sha256: str) -> str:
    """`upstream.toml` with another sha256 in the entry of a path that gives way."""
    entry = re.compile(
        rf"^(path = {re.escape(_quoted(path))}\nsha256 = ).*$", re.MULTILINE
    )
    return entry.sub(lambda found: found[1] + _quoted(sha256), text, count=1)


def _archive(archive: Archive) -> str:
    return f"{{ file = {_quoted(archive.file)}, sha256 = {_quoted(archive.sha256)} }}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
