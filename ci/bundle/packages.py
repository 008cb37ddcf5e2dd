"""The Python packages that the target machine lacks.

The dependency closure of the fork is resolved for the target's Python, with the
versions the target already has taken as given, and what it has is taken away.
``uv`` resolves and unpacks wheels for another Python than its own; nothing is
built and nothing is installed on this machine.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli import Fault, note

UV = "uv==0.13.9"


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_have(path: Path) -> dict[str, str | None]:
    """What the target has: name -> version, or None where it is not known.

    A line is ``name``, ``name version`` or ``name==version``; ``#`` starts a
    comment. Raises ``Fault`` for a line of any other form.
    """
    have: dict[str, str | None] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split("#", 1)[0].replace("==", " ").split()
        if not words:
            continue
        if len(words) > 2 or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", words[0]):
            raise Fault(
                f"{path}, line {number}: expected 'name' or 'name version', "
                f"not {line.strip()!r}"
            )
        have[canonical(words[0])] = words[1] if len(words) == 2 else None
    return have


def find_uv(cache: Path) -> str:
    """Path of ``uv``; one of our own in ``cache`` where there is none."""
    found = shutil.which("uv")
    if found:
        return found
    own = cache / "uv"
    program = own / "bin" / "uv"
    if not program.exists():
        note(f"getting {UV} into {own}")
        shutil.rmtree(own, ignore_errors=True)
        for command in (
            [sys.executable, "-m", "venv", str(own)],
            [str(own / "bin" / "pip"), "install", "-q", UV],
        ):
            if subprocess.run(command).returncode:
                raise Fault(
                    "uv is needed and could not be installed: "
                    f"install it ('pip install {UV}') and run this again"
                )
    return str(program)


@dataclass(frozen=True)
class Target:
    """The machine the bundle is for, in uv's words."""

    python: str
    platform: str

    def options(self) -> list[str]:
        """The target as options of uv."""
        return ["--python-version", self.python, "--python-platform", self.platform]


def _run(command: Sequence[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().splitlines() or ["no message"]
        raise Fault(f"{what}: {' '.join(line.strip() for line in reason)}")


def resolve(
    uv: str,
    requirements: Collection[str],
    have: dict[str, str | None],
    skip: Collection[str],
    target: Target,
    scratch: Path,
) -> list[str]:
    """The packages to carry, as sorted ``name==version`` pins.

    ``skip`` are packages to leave out together with what only they need.
    """
    (scratch / "requirements.in").write_text("\n".join(requirements) + "\n")
    (scratch / "have.txt").write_text(
        "".join(f"{n}=={v}\n" for n, v in sorted(have.items()) if v)
    )
    (scratch / "skip.txt").write_text("".join(f"{name}\n" for name in skip))
    pins = scratch / "pins.txt"
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", "--overrides", str(scratch / "have.txt")]
    command += ["--excludes", str(scratch / "skip.txt"), *target.options()]
    command += ["-o", str(pins), str(scratch / "requirements.in")]
    _run(command, "the packages could not be resolved")
    lines = (line.split(";")[0].strip() for line in pins.read_text().splitlines())
    return sorted(
        line for line in lines if line and canonical(line.split("==")[0]) not in have
    )


def unpack(uv: str, pins: Sequence[str], target: Target, site: Path) -> None:
    """Lay the pinned packages, with their metadata, into the folder ``site``."""
    listed = site.parent / "carried.txt"
    listed.write_text("\n".join(pins) + "\n")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--link-mode", "copy", *target.options()]
    command += ["--target", str(site), "-r", str(listed)]
    _run(command, "the packages could not be fetched")
