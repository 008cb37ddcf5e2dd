"""A bundle archive: a deterministic ``tar.xz`` cut into parts, with a manifest.

A bundle is a folder of parts, ``part1/``, ``part2/``, ..., each small enough to
be sent alone. Beside its piece of an archive every part holds the manifest of
that archive, ``NAME.bundle.json``, so that any part tells which others are
missing. ``scripts/unbundle.sh`` reads what this module writes.
"""

import hashlib
import json
import lzma
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cli import Fault

FORMAT = 1
MIB = 1 << 20
_CHUNK = 4 * MIB


@contextmanager
def _xz(path: Path) -> Iterator[IO[bytes]]:
    """A stream that compresses into ``path``, on every core where ``xz`` is there."""
    program = shutil.which("xz")
    if program is None:
        with lzma.open(path, "wb", preset=6) as stream:
            yield stream
        return
    with path.open("wb") as out:
        process = subprocess.Popen(
            [program, "-6", "-T0", "-c"], stdin=subprocess.PIPE, stdout=out
        )
        assert process.stdin is not None
        try:
            yield process.stdin
        finally:
            process.stdin.close()
            code = process.wait()
    if code:
        raise Fault(f"xz failed with exit code {code}: is the disk full?")


def write(path: Path, files: Mapping[str, Path]) -> int:
    """Write ``files`` (name in the archive -> file) as ``path``.

    Returns their size in bytes. The same files give the same archive: names are
    sorted, owners and times are dropped, and of the mode only the executable bit
    stays.
    """
    size = 0
    with _xz(path) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for name in sorted(files):
            source = files[name]
            info = tarfile.TarInfo(name)
            stat = source.stat()
            info.size = stat.st_size
            info.mode = 0o755 if stat.st_mode & 0o100 else 0o644
            with source.open("rb") as content:
                tar.addfile(info, content)
            size += info.size
    return size


def split(
    archive: Path, out: Path, first: int, parts: int | None, limit: int
) -> list[dict[str, Any]]:
    """Cut ``archive`` into ``out/partK/``, K counting from ``first``.

    ``parts`` is how many (None: as few as ``limit`` bytes each allow). Returns
    the manifest's list of parts. Raises ``Fault`` where that many parts
    are each over the limit.
    """
    total = archive.stat().st_size
    fewest = -(-total // limit)
    if parts is not None and parts < fewest:
        raise Fault(
            f"{archive.name} is {total / MIB:.0f} MiB: {parts} parts would be over "
            f"{limit / MIB:.0f} MiB each; use --split {fewest} or more"
        )
    count = max(parts or fewest, 1)
    each = -(-total // count)
    listed = []
    with archive.open("rb") as source:
        for index in range(count):
            folder = f"part{first + index}"
            name = f"{archive.name}.{index + 1:03d}"
            digest = hashlib.sha256()
            left = min(each, total - each * index)
            (out / folder).mkdir(parents=True, exist_ok=True)
            with (out / folder / name).open("wb") as piece:
                while left:
                    chunk = source.read(min(_CHUNK, left))
                    piece.write(chunk)
                    digest.update(chunk)
                    left -= len(chunk)
            listed.append(
                {
                    "folder": folder,
                    "name": name,
                    "bytes": (out / folder / name).stat().st_size,
                    "sha256": digest.hexdigest(),
                }
            )
    return listed


def manifest_name(archive: str) -> str:
    """The file name of the manifest of ``archive`` (``packages``, ``fork``)."""
    return f"{archive}.bundle.json"


def write_manifest(out: Path, manifest: Mapping[str, Any]) -> None:
    """Lay ``manifest`` beside each part that it lists."""
    text = json.dumps(manifest, indent=1) + "\n"
    for folder in {part["folder"] for part in manifest["parts"]}:
        (out / folder / manifest_name(manifest["archive"])).write_text(text)


def digest_of(files: Mapping[str, Path], *more: str) -> str:
    """A sha256 over names and contents, and over the strings ``more``."""
    digest = hashlib.sha256("\0".join(more).encode())
    for name in sorted(files):
        with files[name].open("rb") as content:
            inner = hashlib.file_digest(content, "sha256").hexdigest()
        digest.update(f"{name}\0{inner}\n".encode())
    return digest.hexdigest()
