"""The fork's own part of a bundle: package, metadata, pristine copies, tests."""

import ast
import json
import os
import subprocess
import tarfile
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BundleError

_SKIPPED_FOLDERS = {"__pycache__"}


@dataclass(frozen=True)
class Project:
    """What the tree's ``pyproject.toml`` says about its installation."""

    version: str
    dependencies: list[str]
    scripts: dict[str, str]
    entry_points: dict[str, dict[str, str]]


def read_project(tree: Path) -> Project:
    """Read the metadata of an applied tree.

    Raises ``BundleError`` where ``tree`` is not one.
    """
    try:
        with (tree / "pyproject.toml").open("rb") as file:
            project: dict[str, Any] = tomllib.load(file)["project"]
        dependencies = project["dependencies"]
        version = project.get("version") or _version(tree / "vllm" / "_version.py")
    except (OSError, KeyError) as error:
        raise BundleError(
            f"{tree} is not an applied tree ({error}): run scripts/apply.sh first"
        ) from error
    return Project(
        version,
        dependencies,
        project.get("scripts", {}),
        project.get("entry-points", {}),
    )


def _version(path: Path) -> str:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            if names & {"__version__", "version"} and isinstance(
                node.value, ast.Constant
            ):
                return str(node.value.value)
    raise KeyError(f"no version in {path}")


def package_files(tree: Path) -> dict[str, Path]:
    """Every file of the tree's ``vllm`` package, by its path in the tree."""
    files = {}
    for folder, subfolders, names in os.walk(tree / "vllm"):
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            files[path.relative_to(tree).as_posix()] = path
    return files


def write_dist_info(project: Project, into: Path) -> Path:
    """Write the metadata that ``importlib.metadata`` finds an installation by."""
    folder = into / f"vllm-{project.version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", "Name: vllm", f"Version: {project.version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in project.dependencies]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    groups = {"console_scripts": project.scripts, **project.entry_points}
    sections = (
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in points.items())
        for group, points in groups.items()
    )
    (folder / "entry_points.txt").write_text("\n".join(sections))
    (folder / "INSTALLER").write_text("bundle\n")
    return folder


def from_sdist(sdist: Path, wanted: Collection[str], into: Path) -> set[str]:
    """Unpack the files of ``wanted`` (files or folders of the sdist) into ``into``.

    Returns the entries of ``wanted`` that the sdist does not hold.
    """
    missing = set(wanted)
    with tarfile.open(sdist) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            within = (w for w in wanted if path == w or path.startswith(w + "/"))
            entry = next(within, None)
            if entry is not None and member.isfile():
                member.name = path
                tar.extract(member, into, filter="data")
                missing.discard(entry)
    return missing


def stack_digest(tree: Path) -> str | None:
    """The digest of the stack that the tree was made by, where it is marked."""
    try:
        marker = json.loads((tree / ".stack.json").read_text())
    except OSError:
        return None
    return marker.get("digest") or marker.get("stack") or None


def refuse_stale(tree: Path) -> None:
    """Raise ``BundleError`` where the tree is not as its stack would make it now.

    What runs from such a bundle is nothing that anybody has, and upstream's tests
    refuse it on the machine, where time is dear.
    """
    status = tree.parent / "scripts" / "status.sh"
    if not status.is_file():
        return
    done = subprocess.run([status, "--json"], capture_output=True, text=True)
    if done.returncode:
        raise BundleError(f"{status}: {done.stderr.strip() or 'no answer'}")
    facts = json.loads(done.stdout)
    applied = facts["applied"] or {}
    if applied.get("digest") != facts["stack"]:
        raise BundleError(
            f"{tree} is not as the stack makes it now: run scripts/apply.sh first"
        )
