"""Files of the checkout: read and written in one way, and told apart by content."""

import hashlib
from pathlib import Path

from .errors import StackError


def read_text(path: Path) -> str:
    """Return the file's text; raises `StackError` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise StackError(
            f"{path} is not UTF-8 text (byte {fault.start}): restore it from git"
        ) from None


def write(place: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    partial = place.with_name(place.name + ".part")
    try:
        partial.write_bytes(data)
        partial.replace(place)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sha256(data: bytes) -> str:
    """Return the sha256 of some bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def blob_id(path: Path) -> str:
    """Return the id that git gives a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def path_sha256(root: Path, path: str) -> str | None:
    """Return the sha256 of a file below `root`; None if it is not there.

    That of a folder, a path with a trailing slash, is of its listing: one
    `SHA256  PATH` a line, sorted by path.
    """
    place = root / path
    if not path.endswith("/"):
        return file_sha256(place) if place.is_file() else None
    if not place.is_dir():
        return None
    listing = sorted(
        (file.relative_to(place).as_posix(), file_sha256(file))
        for file in place.rglob("*")
        if file.is_file()
    )
    return sha256("".join(f"{it}  {name}\n" for name, it in listing).encode())
