"""The base's files, from the index, an sdist, a folder or a git tag."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import archive, fetch, gitcmd
from .base import Base, file_sha256, path_sha256
from .errors import StackError, some
from .gitcmd import Git
from .progress import note
from .tree import DISPOSABLE

_PRISTINE = "take the release itself: scripts/apply.sh without --from"


@dataclass(frozen=True)
class Source:
    """Where the base comes from: `kind` is sdist, folder or clone."""

    kind: str
    place: str

    def lay(self, into: Path, base: Base) -> None:
        """Put the verified base into the new folder `into`."""
        self.unpack(into)
        verify(into, base, complete=self.kind == "sdist")

    def unpack(self, into: Path) -> None:
        """Put the files into the new folder `into`, whatever they are."""
        if self.kind == "sdist":
            note(f"unpacking {Path(self.place).name}")
            archive.unpack_sdist(Path(self.place), into)
        elif self.kind == "folder":
            note(f"copying {self.place}")
            shutil.copytree(
                self.place,
                into,
                symlinks=True,
                ignore=shutil.ignore_patterns(".git", *DISPOSABLE),
            )
        else:
            note(f"cloning {self.place}")
            _lay_clone(self.place, into)


def resolve(wanted: str | None, base: Base, offline: bool) -> Source:
    """What `--from WANTED` means; an sdist is checked against its pin here."""
    if wanted is None:
        path = fetch.fetch(base.sdist, base.version, offline)
        return Source("sdist", str(path))
    found = locate(wanted, offline)
    path = Path(found.place)
    if found.kind == "sdist" and file_sha256(path) != base.sdist.sha256:
        version = archive.sdist_version(path)
        if version not in (None, base.version):
            raise _wrong(version, base, path.name)
        fetch.verify(path, base.sdist)
    return found


def locate(wanted: str, offline: bool) -> Source:
    """What `--from WANTED` names; its content is not looked at."""
    path = Path(wanted)
    if path.is_dir():
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


def verify(root: Path, base: Base, complete: bool) -> None:
    """Check every upstream file that the stack touches, replaces or removes.

    What a build generates (`complete` is false for a folder or clone) may be
    missing there, but not differ.
    """
    wrong = [
        path
        for path, digest in base.touches.items()
        if path_sha256(root, path) != digest
    ]
    for pin in (*base.replaces, *base.removes):
        found = path_sha256(root, pin.path)
        if found != pin.sha256 and (complete or found is not None):
            wrong.append(pin.path)
    if wrong:
        found = version_of(root)
        if found is None or found == base.version:
            raise StackError(
                f"the base is not vLLM {base.version} as released: {some(wrong)} "
                f"differ: {_PRISTINE}"
            )
        raise _wrong(found, base, some(wrong) + " differ")


def drop_builds(root: Path, wheel: archive.Wheel) -> None:
    """Remove what a build has left in a source folder; the wheel brings its own."""
    git_dir = root.with_name(root.name + ".git")
    Git(git_dir).run("init", "-q", "--bare", "--template=")
    out = Git(git_dir, root).run(
        *("-c", "core.bare=false", "ls-files", "--others", "--ignored", "-z"),
        "--exclude-per-directory=.gitignore",
    )
    for path in gitcmd.names(out):
        if path in wheel.sha256 or path.endswith(".so"):
            (root / path).unlink()
    shutil.rmtree(git_dir)


def verify_against_wheel(root: Path, base: Base, wheel: archive.Wheel) -> None:
    """Check that the base's package files are those of the release wheel."""
    wrong = [
        path
        for path, digest in wheel.sha256.items()
        if not base.gives_way(path)
        and (root / path).is_file()
        and file_sha256(root / path) != digest
    ]
    if wrong:
        raise StackError(
            f"the base is not what the release wheel was built from: {some(wrong)} "
            f"differ: {_PRISTINE}"
        )


def version_of(root: Path) -> str | None:
    """The version that a laid sdist states; a clone states none."""
    info = root / "PKG-INFO"
    if info.is_file():
        return archive.metadata_version(info.read_text(errors="replace"))
    return None


def _wrong(found: str | None, base: Base, why: str) -> StackError:
    return StackError(
        f"your base is {found}, this stack is for {base.version} ({why}): {_PRISTINE}"
    )


def _lay_clone(place: str, into: Path) -> None:
    url, _, tag = place.rpartition("@")
    bare = into.with_name(into.name + ".clone")
    # Reaching the remote needs the user's own git settings (proxy, credentials);
    # a bare clone checks nothing out, so they cannot touch the content.
    env = {k: v for k, v in os.environ.items() if k not in _REPOSITORY_VARIABLES}
    command = ["git", "clone", "-q", "--bare", "--depth", "1", "--template="]
    try:
        gitcmd.call([*command, "--branch", tag, "--", url, str(bare)], env)
    except gitcmd.GitError as fault:
        raise StackError(f"cannot clone {url} at {tag}: {fault}") from None
    into.mkdir()
    git = Git(bare, into, bare / "index")
    gitcmd.ignore_attributes(bare)
    git.run("read-tree", "HEAD")
    git.run("checkout-index", "-a", "-q")
    shutil.rmtree(bare)


_REPOSITORY_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_TEMPLATE_DIR",
)
