"""``scripts/bundle.sh``: pack the fork for a GPU machine without a network.

Three archives come out. ``packages`` holds what changes rarely: the Python
packages that the machine lacks, the compiled extensions and the vendored trees.
``upstream`` holds upstream's tests, what only they import, and pristine copies of
the upstream files that the fork replaces or patches. ``fork`` holds what changes
daily: the fork's Python. An archive whose contents have not changed is kept as it
lies.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import cli
import distribution
from cli import Fault, note
from distribution import Project
from patchstack import stack
from patchstack.release import fetch
from patchstack.stack import Stack
from patchstack.stack.base import Base
from patchstack.tree.marker import MARKER

from . import archive, fork, packages, patterns

HERE = Path(__file__).parent
FLASH_ATTENTION = "fork/vllm/vllm_flash_attn"


def parser() -> argparse.ArgumentParser:
    """The command line of scripts/bundle.sh."""
    made = argparse.ArgumentParser(
        prog="scripts/bundle.sh",
        description="For a GPU machine without a network: pack the fork, its compiled "
        "extensions and the Python packages that the machine lacks, in parts that can "
        "be sent one by one. Unpack there with unbundle.sh. A machine that pip serves "
        "takes a wheel instead: scripts/wheel.sh.",
    )
    made.add_argument(
        "--have",
        type=Path,
        required=True,
        metavar="LIST",
        help="what the machine has: one 'name' or 'name version' a line "
        "(example: ci/bundle/have-cuda13-torch211.txt)",
    )
    made.add_argument("--out", type=Path, required=True, metavar="DIR")
    made.add_argument(
        "--split",
        type=int,
        metavar="N",
        help="cut the packages into N parts (default: as few as fit)",
    )
    made.add_argument(
        "--part-mib", type=int, default=58, metavar="MIB", help="a part's limit"
    )
    made.add_argument(
        "--sdist",
        type=Path,
        metavar="FILE",
        help="upstream's source archive (default: from the cache or the index)",
    )
    made.add_argument(
        "--with",
        dest="carry",
        action="append",
        default=[],
        metavar="NAME",
        help="carry a package that ci/bundle/skip.txt leaves out; repeatable",
    )
    made.add_argument(
        "--flash-attention",
        action="store_true",
        help="carry the flash-attention kernels (460 MB) instead of a stand-in",
    )
    made.add_argument("--python-version", default="3.12", metavar="X.Y")
    made.add_argument(
        "--python-platform", default="x86_64-manylinux_2_35", metavar="NAME"
    )
    return made


def find_sdist(given: Path | None, base: Base) -> Path:
    """Upstream's source archive: the given one, the cached one or the index's."""
    if given is None:
        return fetch.fetch(base.sdist, offline=False)
    if not given.is_file():
        raise Fault(f"--sdist {given}: there is no such file")
    fetch.verify(given, base.sdist)
    return given


def gather_packages(
    options: argparse.Namespace,
    scratch: Path,
    folder: str,
    requirements: Collection[str],
    carried: Collection[str] = (),
) -> tuple[dict[str, Path], list[str]]:
    """The files of the packages to carry in ``folder``, and their pins.

    ``carried`` are the pins of another folder, which need no second place.
    """
    skip = patterns.read(HERE / "skip.txt")
    asked = {packages.canonical(n) for n in options.carry}
    unknown = asked - {packages.canonical(n) for n in skip}
    if unknown:
        raise Fault(
            f"--with {min(unknown)}: ci/bundle/skip.txt leaves out no such package"
        )
    skip = [n for n in skip if packages.canonical(n) not in asked]
    target = packages.Target(options.python_version, options.python_platform)
    uv = packages.find_uv(fetch.cache_folder())
    note(f"resolving the packages of {folder}/")
    have = packages.read_have(options.have)
    pins = packages.resolve(uv, requirements, have, skip, target, scratch)
    names = {pin.split("==")[0] for pin in carried}
    pins = [pin for pin in pins if pin.split("==")[0] not in names]
    site = scratch / folder
    if pins:
        note(f"fetching {len(pins)} packages")
        packages.unpack(uv, pins, target, site)
    files = {
        f"{folder}/{path.relative_to(site).as_posix()}": path
        for path in site.rglob("*")
        if path.is_file()
    }
    return files, pins


def gather_fork(
    options: argparse.Namespace, tree: Path, project: Project, scratch: Path
) -> tuple[dict[str, Path], dict[str, Path]]:
    """The fork's files: those that change rarely, and those that change daily."""
    slow: dict[str, Path] = {}
    daily: dict[str, Path] = {}
    for name, path in fork.package_files(tree).items():
        compiled = path.suffix == ".so" or name.startswith("vllm/third_party/")
        (slow if compiled else daily)[f"fork/{name}"] = path
    if not slow:
        raise Fault(
            f"{tree} has no compiled extensions: run scripts/apply.sh, which "
            "lays them from the release's wheel"
        )
    metadata = distribution.dist_info(project, tree) | {"INSTALLER": b"bundle\n"}
    for name, data in metadata.items():
        path = scratch / project.dist_info / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        daily[f"fork/{project.dist_info}/{name}"] = path
    daily[f"fork/{MARKER}"] = tree / MARKER
    if not options.flash_attention:
        for path in (HERE / "standin" / "vllm_flash_attn").glob("*.py"):
            daily[f"{FLASH_ATTENTION}/{path.name}"] = path
    return slow, daily


def gather_upstream(sdist: Path, loaded: Stack, scratch: Path) -> dict[str, Path]:
    """Upstream's originals of the files the fork changes, and upstream's tests."""
    changed = {*loaded.touched, *(pin.path for pin in loaded.base.replaces)}
    package = [path for path in changed if path.startswith("vllm/")]
    files = {}
    for top, wanted in (("base", package), ("upstream", ["tests"])):
        folder = scratch / f"{top}-files"
        missing = fork.from_sdist(sdist, wanted, folder)
        if missing:
            raise Fault(f"{sdist.name} holds no {min(missing)}")
        for path in folder.rglob("*"):
            if path.is_file():
                files[f"{top}/{path.relative_to(folder).as_posix()}"] = path
    return files


def pack(
    name: str,
    files: dict[str, Path],
    options: argparse.Namespace,
    first: int,
    parts: int | None,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Make archive ``name`` in the bundle, or keep an equal one; its manifest."""
    limit = options.part_mib * archive.MIB
    inputs = archive.digest_of(files, str(archive.FORMAT), str(parts), str(limit))
    for old in sorted(options.out.glob(f"part*/{archive.manifest_name(name)}")):
        manifest: dict[str, Any] = json.loads(old.read_text())
        if (
            manifest.get("inputs") == inputs
            and manifest["parts"][0]["folder"] == f"part{first}"
            and all(
                (options.out / p["folder"] / p["name"]).is_file()
                for p in manifest["parts"]
            )
        ):
            note(f"{name}: unchanged")
            return manifest
    started = time.monotonic()
    note(f"{name}: packing {len(files)} files")
    whole = options.out / f"{name}.tar.xz"
    size = archive.write(whole, files)
    try:
        listed = archive.split(whole, options.out, first, parts, limit)
    finally:
        whole.unlink()
    manifest = {
        "archive": name,
        "format": archive.FORMAT,
        "inputs": inputs,
        "files": len(files),
        "unpacked_bytes": size,
        "parts": listed,
        **about,
    }
    archive.write_manifest(options.out, manifest)
    packed = sum(part["bytes"] for part in listed)
    note(
        f"{name}: {size / archive.MIB:.0f} MiB in {packed / archive.MIB:.0f} MiB, "
        f"{len(listed)} parts, {time.monotonic() - started:.0f} s"
    )
    return manifest


def drop_stale(out: Path, manifests: Sequence[dict[str, Any]]) -> None:
    """Remove what an earlier bundle left in ``out``."""
    wanted = set()
    for manifest in manifests:
        for part in manifest["parts"]:
            wanted.add(out / part["folder"] / part["name"])
            wanted.add(
                out / part["folder"] / archive.manifest_name(manifest["archive"])
            )
    for pattern in ("*.bundle.json", "*.tar.xz.*", "unbundle.sh"):
        for path in set(out.glob(f"part*/{pattern}")) - wanted:
            path.unlink()
    for folder in out.glob("part*"):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def run(options: argparse.Namespace) -> int:
    """Make the bundle, or what of it has changed."""
    if not options.have.is_file():
        raise Fault(f"--have {options.have}: there is no such file")
    if options.split is not None and options.split < 1:
        raise Fault(f"--split {options.split}: give 1 or more")
    loaded = stack.load(cli.REPO)
    marker = distribution.require_applied(loaded)
    tree = loaded.places.tree
    project = distribution.read_project(tree)
    sdist = find_sdist(options.sdist, loaded.base)
    options.out.mkdir(parents=True, exist_ok=True)
    # The bundle keeps itself out of git wherever it lies.
    (options.out / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(prefix="bundle-", dir=options.out) as folder:
        scratch = Path(folder)
        slow, daily = gather_fork(options, tree, project, scratch)
        upstream = gather_upstream(sdist, loaded, scratch)
        carried, pins = gather_packages(options, scratch, "site", project.dependencies)
        more, test_pins = gather_packages(
            options,
            scratch,
            "upstream",
            patterns.read(HERE / "test_packages.txt"),
            pins,
        )
        upstream |= more
        trim = patterns.read(HERE / "trim.txt")
        if options.flash_attention:
            trim = [
                pattern for pattern in trim if not pattern.startswith(FLASH_ATTENTION)
            ]

        def trimmed(files: dict[str, Path]) -> dict[str, Path]:
            return {n: p for n, p in files.items() if not patterns.matches(n, trim)}

        target = {
            "python": options.python_version,
            "platform": options.python_platform,
        }
        manifests: list[dict[str, Any]] = []
        for name, files, parts, about in (
            ("packages", slow | carried, options.split, {"packages": pins}),
            ("upstream", upstream, None, {"packages": test_pins}),
            (
                "fork",
                daily,
                None,
                {"version": project.version, "stack": marker.digest},
            ),
        ):
            first = 1 + sum(len(it["parts"]) for it in manifests)
            about = {**target, **about}
            manifests.append(pack(name, trimmed(files), options, first, parts, about))
    drop_stale(options.out, manifests)
    listed = [part for it in manifests for part in it["parts"]]
    script = cli.REPO / "scripts" / "unbundle.sh"
    shutil.copy(script, options.out / listed[-1]["folder"] / script.name)
    for part in listed:
        print(f"{part['folder']}/{part['name']}  {part['bytes'] / archive.MIB:.1f} MiB")
    note(f"{options.out}: send the parts, then run unbundle.sh there")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(parser().parse_args, run))
