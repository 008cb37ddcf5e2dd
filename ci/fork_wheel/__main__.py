"""`scripts/wheel.sh`: the fork as a wheel, for machines that pip serves.

It is the pinned wheel of the release with the tree's Python, version, metadata and
marker inside.  Nothing is compiled, so that any machine packs for every other.
"""

import argparse
import itertools
import json
import platform
import shlex
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import cli
import distribution
from cli import note
from distribution import Project
from patchstack import stack
from patchstack.files import file_sha256
from patchstack.release import fetch
from patchstack.release.archive import Wheel
from patchstack.stack import Stack
from patchstack.tree.marker import MARKER, WHEEL_SOURCE, Marker, read_wheel_files

from .repack import repack

PACKAGE = "vllm/"
GENERATOR = "vllm-patchstack"


def parser() -> argparse.ArgumentParser:
    """The command line of scripts/wheel.sh."""
    made = argparse.ArgumentParser(
        prog="scripts/wheel.sh",
        description="Pack the fork as a wheel that pip installs without a checkout: "
        "the release's wheel with the tree's Python, version and stack inside. Needs "
        "an applied tree. The same stack gives the same bytes.",
    )
    made.add_argument(
        "--arch",
        default=platform.machine(),
        metavar="x86_64|aarch64",
        help="the machines it is for, whatever this one is (default: %(default)s)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=cli.REPO / "dist",
        metavar="DIR",
        help="folder that takes the wheel (default: dist/)",
    )
    made.add_argument("--offline", action="store_true", help="use only the cache")
    made.add_argument(
        "--json",
        action="store_true",
        help="result as JSON on stdout (docs/schemas/wheel.v1.json)",
    )
    return made


def run(options: argparse.Namespace) -> int:
    """Pack and say what came out."""
    loaded = stack.load(cli.REPO)
    facts = pack(loaded, options.arch, options.out, options.offline)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print(
            f"{facts['wheel']}\n"
            f"  stack  {facts['stack']}, vLLM {facts['base']} for {facts['arch']}\n"
            f"  size   {int(facts['bytes']) >> 20} MiB, {facts['files']} files\n"
            f"  sha256 {facts['sha256']}\n"
            f"next: pip install {shlex.quote(str(facts['wheel']))}"
        )
    return 0


def pack(loaded: Stack, arch: str, out: Path, offline: bool) -> dict[str, str | int]:
    """Write the wheel for `arch` into the folder `out`, whole or not at all.

    Returns what `--json` prints.  Raises `Fault` where the tree is not as applied or
    the release's wheel cannot be had.
    """
    release = loaded.base.wheel(arch)
    marker = distribution.require_applied(loaded)
    project = distribution.read_project(loaded.places.tree)
    source = fetch.fetch(release, offline)
    tags = release.file.removesuffix(".whl").split("-", 2)[2]
    name = f"vllm-{project.version}-{tags}.whl"
    marker = replace(
        marker,
        source=WHEEL_SOURCE,
        machine=arch,
        wheel=release.sha256,
        wheel_files=_wheel_only(loaded, Wheel(source)),
    )
    new = _new_files(loaded.places.tree, marker, project, tags)

    def keep(path: str) -> bool:
        ours = path in new or path in loaded.touched or loaded.base.gives_way(path)
        return path.startswith(PACKAGE) and not ours

    note(f"packing {name}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".wheel-") as scratch:
        made = Path(scratch) / name
        files = repack(source, made, keep, new, project.dist_info)
        facts: dict[str, str | int] = {
            "wheel": str(out / name),
            "sha256": file_sha256(made),
            "bytes": made.stat().st_size,
            "files": files,
            "version": project.version,
            "base": loaded.base.version,
            "arch": arch,
            "stack": marker.identity,
        }
        made.replace(out / name)
    return facts


def _wheel_only(loaded: Stack, wheel: Wheel) -> int:
    """How many files of the wheel the release's source lacks."""
    tree = loaded.places.tree
    laid = read_wheel_files(tree)
    # The tree has those of its own architecture; others' are nowhere in it.
    return sum(
        path in laid or not ((tree / path).exists() or loaded.base.gives_way(path))
        for path in wheel.sha256
    )


def _new_files(
    tree: Path, marker: Marker, project: Project, tags: str
) -> dict[str, bytes]:
    """What is not the release's, by path: our files, the marker, the metadata."""
    files = {path: (tree / path).read_bytes() for path in sorted(marker.files)}
    # Beside the package, where it looks for it.
    files[MARKER] = (json.dumps(asdict(marker), indent=1) + "\n").encode()
    metadata = distribution.dist_info(project, tree)
    metadata["WHEEL"] = _wheel_file(tags).encode()
    files |= {f"{project.dist_info}/{name}": it for name, it in metadata.items()}
    return files


def _wheel_file(tags: str) -> str:
    """The WHEEL file: a line for each tag of a set such as `cp38-abi3-linux_x86_64`."""
    lines = ["Wheel-Version: 1.0", f"Generator: {GENERATOR}", "Root-Is-Purelib: false"]
    for tag in itertools.product(*(part.split(".") for part in tags.split("-"))):
        lines.append(f"Tag: {'-'.join(tag)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(cli.run(parser().parse_args, run))
