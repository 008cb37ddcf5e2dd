"""Where the fork, the base and upstream's tests lie: in a checkout or in a bundle.

A checkout has the applied tree, and makes the base from the release's archives. A
machine with a bundle (`VLLM_BUNDLE`, set by scripts/unbundle.sh) has no archives:
there the base is the bundle's fork with upstream's originals put back.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cli import Fault, note
from patchstack.files import blob_id, file_sha256
from patchstack.release import fetch, source
from patchstack.release.archive import Wheel
from patchstack.stack import Stack
from patchstack.tree import identity
from patchstack.tree.marker import MARKER
from patchstack.tree.marker import read as read_marker


@dataclass(frozen=True)
class Tree:
    """A package under test and the tests for it."""

    root: Path
    """Holds the package, `vllm/`."""
    tests: Path
    """Holds upstream's `tests/`."""
    packages: tuple[Path, ...] = ()
    """More folders to import from."""
    scratch: bool = False
    """Whether bytecode may be left in it."""


def bundle() -> Path | None:
    """The unpacked bundle that the environment names."""
    place = os.environ.get("VLLM_BUNDLE")
    return Path(place) if place else None


def fork(loaded: Stack, bundle: Path | None) -> Tree:
    """The fork's tree; raises `Fault` for a bundle of another stack."""
    if bundle is None:
        return Tree(loaded.places.tree, loaded.places.tree)
    tree = _in_bundle(bundle, bundle / "fork")
    marker = read_marker(tree.root)
    if marker is None or marker.digest != loaded.digest or _differ(loaded, tree.root):
        raise Fault(
            f"the bundle in {bundle} is not of this stack: pack it again with "
            "scripts/bundle.sh"
        )
    return tree


def identity_of(tree: Tree) -> str:
    """What an engine run from the tree reports, beside the release's version."""
    return identity.reported(tree.root, read_marker(tree.root))


@contextmanager
def base(loaded: Stack, bundle: Path | None, folder: Path) -> Iterator[Tree]:
    """The release as it is, in a scratch copy; one in a checkout lies in `folder`."""
    with tempfile.TemporaryDirectory(dir=bundle or folder, prefix=".base-") as made:
        root = Path(made) / "vllm"
        if bundle is None:
            _unpack(loaded, root)
            yield Tree(root, root, scratch=True)
        else:
            _put_back(loaded, bundle, root)
            yield _in_bundle(bundle, root)


def _in_bundle(bundle: Path, root: Path) -> Tree:
    return Tree(root, bundle / "upstream", (bundle / "site",), scratch=True)


def _differ(loaded: Stack, root: Path) -> bool:
    """Whether our files there are not those of this checkout."""
    return any(
        not (root / path).is_file()
        or file_sha256(root / path) != file_sha256(loaded.places.tree / path)
        for path in loaded.own
        if path.startswith(identity.PACKAGE)
    )


def _unpack(loaded: Stack, root: Path) -> None:
    release = loaded.base
    note(f"unpacking vLLM {release.version}")
    source.resolve(None, release, loaded.places, offline=False).unpack(root)
    wheel = fetch.fetch(release.wheel(platform.machine()), offline=False)
    Wheel(wheel).unpack(root, lambda path: not (root / path).exists())


def _put_back(loaded: Stack, bundle: Path, root: Path) -> None:
    """Make the base of the bundle's fork; what both have is linked, not copied."""
    replaced = {pin.path: pin.sha256 for pin in loaded.base.replaces}
    originals = {
        path: digest
        for path, digest in (loaded.originals | replaced).items()
        if path.startswith(identity.PACKAGE)
    }
    theirs = bundle / "fork"
    leave = {MARKER, *loaded.own, *originals}

    def names(folder: str, inside: list[str]) -> set[str]:
        at = Path(folder).relative_to(theirs)
        return {
            it for it in inside if it == "__pycache__" or (at / it).as_posix() in leave
        }

    shutil.copytree(theirs, root, ignore=names, copy_function=os.link)
    for path, digest in originals.items():
        original = bundle / "base" / path
        of = file_sha256 if path in replaced else blob_id
        if not original.is_file() or of(original) != digest:
            raise Fault(
                f"{original} is not upstream's file: unpack the bundle again with "
                "scripts/unbundle.sh --force"
            )
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(original, root / path)
