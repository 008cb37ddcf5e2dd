"""The fork as a distribution: what it is called, what it needs, may it be packed."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import Fault
from patchstack.errors import some
from patchstack.stack import Stack
from patchstack.stack import version as versions
from patchstack.tree import Tree, identity
from patchstack.tree.marker import Marker


@dataclass(frozen=True)
class Project:
    """The tree's version and the `[project]` table of its `pyproject.toml`."""

    version: str
    table: dict[str, Any]

    @property
    def dependencies(self) -> list[str]:
        """The requirements of an installation without extras."""
        listed: list[str] = self.table["dependencies"]
        return listed

    @property
    def dist_info(self) -> str:
        """Name of the folder by which an installation is found."""
        return f"vllm-{self.version}.dist-info"


def read_project(root: Path) -> Project:
    """Read the metadata of the tree in `root`; raises `Fault` where it is none."""
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        table["dependencies"]
    except (OSError, KeyError, ValueError) as fault:
        raise Fault(
            f"{root} is not an applied tree ({fault}): run scripts/apply.sh first"
        ) from fault
    version = versions.read(root)
    if version is None:
        raise Fault(f"no version in {root / versions.FILE}: restore it from git")
    return Project(version, table)


def dist_info(project: Project, root: Path) -> dict[str, bytes]:
    """The files of the `.dist-info` folder that every installation has, by name.

    They say what `pip install -e` of the tree in `root` says.
    """
    return {
        "METADATA": _metadata(project, root).encode(),
        "entry_points.txt": _entry_points(project).encode(),
        "top_level.txt": b"vllm\n",
        **{
            f"licenses/{name}": (root / name).read_bytes()
            for name in project.table.get("license-files", [])
        },
    }


def _metadata(project: Project, root: Path) -> str:
    """Core metadata 2.4, of the fields that the tree's `[project]` table has."""
    table = project.table
    lines = ["Metadata-Version: 2.4", "Name: vllm", f"Version: {project.version}"]
    for key, field in (
        ("description", "Summary"),
        ("license", "License-Expression"),
        ("requires-python", "Requires-Python"),
    ):
        if key in table:
            lines.append(f"{field}: {table[key]}")
    lines += [f"License-File: {name}" for name in table.get("license-files", [])]
    lines += [f"Requires-Dist: {it}" for it in project.dependencies]
    for extra, requirements in table.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {_for_extra(it, extra)}" for it in requirements]
    text = "\n".join(lines) + "\n"
    if "readme" in table:
        text += "Description-Content-Type: text/markdown\n\n"
        text += (root / table["readme"]).read_text()
    return text


def _for_extra(requirement: str, extra: str) -> str:
    name, _, marker = (part.strip() for part in requirement.partition(";"))
    when = f'extra == "{extra}"'
    return f"{name}; ({marker}) and {when}" if marker else f"{name}; {when}"


def _entry_points(project: Project) -> str:
    groups = {
        "console_scripts": project.table.get("scripts", {}),
        **project.table.get("entry-points", {}),
    }
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in points.items())
        for group, points in groups.items()
    )


def require_applied(loaded: Stack) -> Marker:
    """The marker of the stack's tree; raises `Fault` where that is not as applied.

    What runs from a package of such a tree is nothing that anybody has, and its
    identity names another one.
    """
    tree = Tree(loaded.places)
    marker = tree.marker
    fault = tree.fault(loaded, marker.machine if marker else "")
    if fault or marker is None:
        raise Fault(f"nothing is packed: {fault}")
    edited = identity.edited(tree.folder, marker)
    if edited:
        raise Fault(
            f"nothing is packed: own files were edited since scripts/apply.sh "
            f"({some(edited)}): run it again"
        )
    return marker
