"""A wheel made of another: what stays is copied as it lies, still compressed.

Bytes that a compressor has written differ between machines.  Here none are: what
stays are the release's own, what is new is stored, so that the same stack gives the
same wheel everywhere.
"""

import base64
import copy
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cli import Fault
from patchstack.progress import Ticker

RECORD = "RECORD"
_CHUNK = 8 << 20


def repack(
    release: Path,
    into: Path,
    keep: Callable[[str], bool],
    new: Mapping[str, bytes],
    dist_info: str,
) -> int:
    """Write the wheel `into` from the wheel `release`; returns how many files it has.

    Of the release stay the files that `keep` picks by path; the others' hashes in its
    RECORD are trusted, since the whole of it is pinned.  `new` are the other files,
    by path.  RECORD is written last, in the folder `dist_info`.  Raises `Fault` if
    `release` is no wheel.
    """
    try:
        source = zipfile.ZipFile(release)
        known = _read_record(source)
    except (zipfile.BadZipFile, KeyError, StopIteration) as fault:
        raise Fault(f"{release} is not a readable wheel: {fault}") from None
    members = [it for it in source.infolist() if keep(it.filename)]
    rows = [known[it.filename] for it in members]
    rows += [(name, _digest(data), str(len(data))) for name, data in new.items()]
    record = f"{dist_info}/{RECORD}"
    listing = io.StringIO()
    writer = csv.writer(listing, lineterminator="\n")
    writer.writerows([*sorted(rows), (record, "", "")])
    # Of the release's day, whenever it is packed.
    date = max(it.date_time for it in source.infolist())
    with source, zipfile.ZipFile(into, "w") as target:
        _copy(source, members, target)
        for name, data in {**new, record: listing.getvalue().encode()}.items():
            member = zipfile.ZipInfo(name, date)
            member.create_system = 3
            member.external_attr = 0o100644 << 16
            target.writestr(member, data)
    return len(members) + len(new) + 1


def _read_record(wheel: zipfile.ZipFile) -> dict[str, tuple[str, str, str]]:
    name = next(it for it in wheel.namelist() if it.endswith(f".dist-info/{RECORD}"))
    rows = csv.reader(io.StringIO(wheel.read(name).decode()))
    return {path: (path, digest, size) for path, digest, size in rows}


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def _copy(
    source: zipfile.ZipFile, members: Iterable[zipfile.ZipInfo], target: zipfile.ZipFile
) -> None:
    """Copy `members` into `target`, which is empty, as they lie in `source`.

    A member takes all from its header to the next one's.
    """
    assert source.fp is not None
    assert target.fp is not None
    starts = sorted(it.header_offset for it in source.infolist())
    ends = dict(zip(starts, [*starts[1:], source.start_dir], strict=True))
    ticker = Ticker("packing")
    for member in members:
        moved = copy.copy(member)
        moved.header_offset = target.fp.tell()
        source.fp.seek(member.header_offset)
        left = ends[member.header_offset] - member.header_offset
        while left:
            chunk = source.fp.read(min(left, _CHUNK))
            if not chunk:
                raise Fault(f"{source.filename} ends early: fetch it again")
            target.fp.write(chunk)
            left -= len(chunk)
        target.filelist.append(moved)
        target.NameToInfo[moved.filename] = moved
        ticker.tick(f"{target.fp.tell() >> 20} MiB")
    # Where zipfile goes on.
    target.start_dir = target.fp.tell()
