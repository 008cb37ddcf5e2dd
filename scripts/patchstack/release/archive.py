"""Unpacking release archives: nothing lands outside the folder it is meant for."""

import base64
import csv
import datetime
import io
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import StackError
from ..progress import Ticker

PACKAGE = "vllm/"
DISPOSABLE = (
    "__pycache__",
    "*.pyc",
    "*.egg-info",
    ".pytest_cache",
    ".ruff_cache",
    ".mypy_cache",
    ".triton",
)
"""Names of what running and installing a tree leaves behind."""


def unpack_sdist(archive: Path, into: Path) -> None:
    """Unpack an sdist, without its top folder, as the new folder `into`."""
    box = into.with_name(into.name + ".unpack")
    try:
        with tarfile.open(archive) as tar:
            # The filter refuses absolute paths, "..", links out of the folder
            # and devices, and drops foreign owners and unusual modes.
            tar.extractall(box, filter="data")
    except tarfile.FilterError as fault:
        raise StackError(f"{archive} is not safe to unpack: {fault}") from None
    except (tarfile.TarError, EOFError) as fault:
        raise StackError(f"{archive} is not a readable sdist: {fault}") from None
    top = list(box.iterdir())
    if len(top) != 1 or not top[0].is_dir():
        raise StackError(f"{archive} is not an sdist: it has no single top folder")
    top[0].rename(into)
    box.rmdir()


def sdist_version(archive: Path) -> str | None:
    """Return the version that an sdist states in its PKG-INFO; None if it is none."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if PurePosixPath(member.name).match("*/PKG-INFO"):
                    info = tar.extractfile(member)
                    return metadata_version(info.read().decode()) if info else None
    except (tarfile.TarError, EOFError, OSError):
        pass
    return None


def metadata_version(text: str) -> str | None:
    """Return the version that the text of a package's metadata states."""
    for line in text.splitlines():
        if not line:
            break
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return None


@dataclass(frozen=True)
class WheelFile:
    """A file that only the wheel has: bytes, mtime in ns, content."""

    size: int
    mtime_ns: int
    sha256: str


def recorded(text: str) -> dict[str, str]:
    """Path -> sha256 of the package files that a wheel's RECORD lists."""
    return {
        row[0]: base64.urlsafe_b64decode(row[1].partition("=")[2] + "==").hex()
        for row in csv.reader(io.StringIO(text))
        if row and row[0].startswith(PACKAGE) and row[1].startswith("sha256=")
    }


class Wheel:
    """The package files of a release wheel.  Its RECORD is trusted: pinned bytes."""

    def __init__(self, path: Path) -> None:
        """Open a wheel; raises `StackError` if it is none."""
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            self.sha256 = self._record()
        except (zipfile.BadZipFile, KeyError, ValueError) as fault:
            raise StackError(f"{path} is not a readable wheel: {fault}") from None

    def _record(self) -> dict[str, str]:
        name = next(
            (n for n in self._zip.namelist() if n.endswith(".dist-info/RECORD")), None
        )
        if name is None:
            raise ValueError("no RECORD")
        return recorded(self._zip.read(name).decode())

    def unpack(self, into: Path, wanted: Callable[[str], bool]) -> dict[str, WheelFile]:
        """Lay the package files that `wanted(path)` picks; returns them by path."""
        members = [
            it
            for it in self._zip.infolist()
            if it.filename in self.sha256 and wanted(it.filename)
        ]
        total = sum(it.file_size for it in members)
        ticker = Ticker(f"unpacking {self.path.name}")
        laid, done = {}, 0
        for member in members:
            _refuse_unsafe(self.path, member)
            place = into / member.filename
            place.parent.mkdir(parents=True, exist_ok=True)
            with self._zip.open(member) as source, place.open("xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            place.chmod(0o755 if (member.external_attr >> 16) & 0o100 else 0o644)
            mtime_ns = _mtime_ns(member)
            os.utime(place, ns=(mtime_ns, mtime_ns))
            laid[member.filename] = WheelFile(
                member.file_size, mtime_ns, self.sha256[member.filename]
            )
            done += member.file_size
            ticker.tick(f"{done >> 20} of {total >> 20} MiB")
        return laid


def _mtime_ns(member: zipfile.ZipInfo) -> int:
    # A fixed time makes an edit show without hashing hundreds of MiB.
    when = datetime.datetime(*member.date_time, tzinfo=datetime.UTC)
    return int(when.timestamp()) * 1_000_000_000


def _refuse_unsafe(archive: Path, member: zipfile.ZipInfo) -> None:
    path = PurePosixPath(member.filename)
    linked = stat.S_ISLNK(member.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or linked:
        raise StackError(f"{archive} is not safe to unpack: {member.filename}")
