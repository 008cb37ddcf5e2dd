"""Release files, through a cache keyed by content."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StackError
from ..files import file_sha256
from ..progress import note
from ..stack.base import Archive
from .index import Index, Link

_RELEASE = re.compile(r"vllm-(\d+(?:\.\d+)*(?:\.post\d+)?)\.tar\.gz")


def cache_folder() -> Path:
    """Return where downloads are kept."""
    named = os.environ.get("PATCHSTACK_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(home).expanduser() / "vllm-patchstack"
    except RuntimeError:
        # A user that the system does not know, as in a container.
        raise StackError(
            "HOME is not set, so there is no place for the cache: set PATCHSTACK_CACHE "
            "to a folder of yours"
        ) from None


def fetch(archive: Archive, offline: bool) -> Path:
    """Return the pinned file, from the cache or the index; its content is verified."""
    place = _place(archive)
    if place.is_file():
        if file_sha256(place) == archive.sha256:
            return place
        note(f"dropped {place}: its content is not what upstream.toml pins")
        place.unlink()
    option = "--wheel" if archive.file.endswith(".whl") else "--from"
    if offline:
        raise _not_cached(archive.file, f", or give the file ({option} FILE)")
    with _writing():
        # First, so that a place that cannot be a cache is told as that.
        place.parent.mkdir(parents=True, exist_ok=True)
    link = Index().offers().get(archive.file)
    if link is None:
        raise StackError(
            f"the package index has no {archive.file}: check pip's index settings, or "
            f"give the file ({option} FILE)"
        )
    return _keep(link, archive)


def find_sdist(version: str, offline: bool) -> Path:
    """Return the sdist of a release that is not pinned, from the cache or the index."""
    return fetch(_find(f"vllm-{version}.tar.gz", version, offline), offline)


def find_wheel(version: str, machine: str, offline: bool) -> Archive:
    """Return name and content of a release's wheel.

    It is fetched only if the index does not state its content.
    """
    return _find(f"vllm-{version}-*_{machine}.whl", version, offline)


def newest() -> str:
    """Return the version of the newest release that has an sdist on the index."""
    found = filter(None, map(_RELEASE.fullmatch, Index().offers()))
    versions = [(tuple(map(int, re.findall(r"\d+", it[1]))), it[1]) for it in found]
    if not versions:
        raise StackError("the package index has no sdist of vLLM: check its settings")
    return max(versions)[1]


def verify(path: Path, archive: Archive) -> None:
    """Raise `StackError` unless the file is the pinned one."""
    found = file_sha256(path)
    if found != archive.sha256:
        raise StackError(
            f"{path} is not {archive.file}: sha256 {found[:12]}..., upstream.toml "
            f"pins {archive.sha256[:12]}...: fetch it again"
        )


def _place(archive: Archive) -> Path:
    return cache_folder() / "archives" / archive.sha256 / archive.file


def _not_cached(name: str, remedy: str = "") -> StackError:
    return StackError(
        f"{name} is not in the cache ({cache_folder()}): run once without --offline"
        + remedy
    )


def _find(pattern: str, version: str, offline: bool) -> Archive:
    """Return the one file of that name in the cache, else on the index."""
    cached = sorted(cache_folder().glob(f"archives/*/{pattern}"))
    if len(cached) == 1:
        return Archive(cached[0].name, cached[0].parent.name)
    if offline:
        raise _not_cached(pattern)
    expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    found = [it for name, it in Index().offers().items() if expression.fullmatch(name)]
    if len(found) != 1:
        raise StackError(
            f"the package index has {len(found) or 'no'} {pattern}: check that there "
            f"is a vLLM {version}, and pip's index settings"
        )
    if found[0].sha256:
        return Archive(found[0].name, found[0].sha256)
    place = _keep(found[0], None)
    return Archive(place.name, place.parent.name)


def _keep(link: Link, archive: Archive | None) -> Path:
    """Fetch a file into the cache; one without a pin is known by what it holds."""
    folder = cache_folder() / "archives"
    with _writing():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            fetched = Path(temporary) / link.name
            Index().fetch(link, fetched)
            if archive is None:
                archive = Archive(link.name, file_sha256(fetched))
            verify(fetched, archive)
            place = _place(archive)
            place.parent.mkdir(exist_ok=True)
            fetched.replace(place)
    return place


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        if fault.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise StackError(
            f"cannot write to the cache: {fault}: set PATCHSTACK_CACHE to a folder "
            "of yours"
        ) from None
