"""The base's files, from the index, an sdist, a folder or a git tag."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import git
from ..errors import StackError, some
from ..files import file_sha256, path_sha256
from ..progress import note
from ..stack import Places
from ..stack.base import Base
from . import archive, fetch

_PRISTINE = "take the release itself: scripts/apply.sh without --from"
# What a build leaves in a source folder; the wheel brings its own.
_BUILT = ("*.so",)


@dataclass(frozen=True)
class Source:
    """Where a release comes from: `kind` is sdist, folder or clone."""

    kind: str
    place: str

    def unpack(self, into: Path) -> None:
        """Put the files into the new folder `into`, whatever they are."""
        if self.kind == "sdist":
            note(f"unpacking {Path(self.place).name}")
            archive.unpack_sdist(Path(self.place), into)
        elif self.kind == "folder":
            note(f"copying {self.place}")
            left_out = (".git", *_BUILT, *archive.DISPOSABLE)
            ignore = shutil.ignore_patterns(*left_out)
            shutil.copytree(self.place, into, symlinks=True, ignore=ignore)
        else:
            note(f"cloning {self.place}")
            _clone(self.place, into)


def resolve(wanted: str | None, base: Base, places: Places, offline: bool) -> Source:
    """Return what `--from WANTED` means; an sdist is checked against its pin."""
    if wanted is None:
        return Source("sdist", str(fetch.fetch(base.sdist, offline)))
    found = locate(wanted, places, offline)
    path = Path(found.place)
    if found.kind == "sdist" and file_sha256(path) != base.sdist.sha256:
        version = archive.sdist_version(path)
        if version not in (None, base.version):
            raise _wrong(version, base, path.name)
        fetch.verify(path, base.sdist)
    return found


def locate(wanted: str, places: Places, offline: bool) -> Source:
    """Return what `--from WANTED` names; its content is not looked at.

    Raises `StackError` for a folder that holds where it would be copied to.
    """
    path = Path(wanted)
    if path.is_dir():
        ours = (places.scratch, places.rebase, places.repo, *places.repo.parents)
        if any(it.is_dir() and it.samefile(path) for it in ours):
            raise StackError(
                f"--from {wanted} holds this checkout, which would be copied into "
                "itself: name a folder with upstream's source"
            )
        return Source("folder", str(path.resolve()))
    if path.is_file():
        return Source("sdist", str(path.resolve()))
    url, at, tag = wanted.rpartition("@")
    is_url = "://" in url or ":" in url or Path(url).is_dir()
    if at and tag and is_url and not tag.startswith("-") and not url.startswith("-"):
        if offline and "://" in url and not url.startswith("file://"):
            raise StackError(f"--offline and {wanted} exclude each other: drop one")
        return Source("clone", wanted)
    raise StackError(f"--from {wanted}: no such sdist, folder or GIT-URL@TAG")


def verify(root: Path, base: Base, wheel: archive.Wheel, complete: bool) -> None:
    """Check that a laid base is the release that the wheel was built from.

    What a build generates (`complete` is false for a folder or clone) may be
    missing there, but not differ.
    """
    wrong = list(_other_package_files(root, base, wheel))
    for pin in (*base.replaces, *base.removes):
        found = path_sha256(root, pin.path)
        if found != pin.sha256 and (complete or found is not None):
            wrong.append(pin.path)
    if wrong:
        version = version_of(root)
        if version in (None, base.version):
            raise StackError(
                f"the base is not vLLM {base.version} as released: {some(wrong)} "
                f"differ: {_PRISTINE}"
            )
        raise _wrong(version, base, some(wrong) + " differ")


def _other_package_files(root: Path, base: Base, wheel: archive.Wheel) -> Iterable[str]:
    for path, digest in wheel.sha256.items():
        place = root / path
        there = place.is_file() and not base.gives_way(path)
        if there and file_sha256(place) != digest:
            yield path


def version_of(root: Path) -> str | None:
    """Return the version that a laid sdist states; a clone states none."""
    info = root / "PKG-INFO"
    if info.is_file():
        return archive.metadata_version(info.read_text(errors="replace"))
    return None


def _wrong(found: str | None, base: Base, why: str) -> StackError:
    return StackError(
        f"your base is {found}, this stack is for {base.version} ({why}): {_PRISTINE}"
    )


def _clone(place: str, into: Path) -> None:
    url, _, tag = place.rpartition("@")
    bare = into.with_name(into.name + ".clone")
    # Reaching the remote needs the user's own git settings (proxy, credentials);
    # a bare clone checks nothing out, so they cannot touch the content.
    local = git.call(["git", "rev-parse", "--local-env-vars"], os.environ).split()
    env = {k: v for k, v in os.environ.items() if k.encode() not in local}
    command = ["git", "clone", "-q", "--bare", "--depth", "1", "--template="]
    try:
        git.call([*command, "--branch", tag, "--", url, str(bare)], env)
    except git.GitError as fault:
        raise StackError(f"cannot clone {url} at {tag}: {fault}") from None
    into.mkdir()
    checkout = git.Git(bare, into, bare / "index")
    git.set_attributes(bare)
    checkout.run("read-tree", "HEAD")
    checkout.run("checkout-index", "-a", "-q")
    shutil.rmtree(bare)
