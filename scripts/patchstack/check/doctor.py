"""Is an installation the fork, whole, and what will it decode with?"""

import json
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

from ..errors import StackError, some
from ..files import file_sha256
from ..progress import Ticker, note
from ..release import archive
from ..stack import Stack, version
from ..tree import Tree, identity
from ..tree import marker as markers
from ..tree.marker import WHEEL_SOURCE, read_wheel_files

_INSTALL = "pip install -e vllm"
_REINSTALL = "install the wheel that scripts/wheel.sh makes now"
# Its /version and metrics are its own.
_RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"


@dataclass(frozen=True)
class WrongVersion:
    """A requirement that another version is installed of."""

    name: str
    found: str
    wanted: str


@dataclass(frozen=True)
class Facts:
    """What the installation's own interpreter says."""

    python: str
    """the interpreter"""
    python_version: str
    version: str | None
    """of the installed vllm"""
    versions: dict[str, str | None]
    """of the packages it builds on"""
    torch: str | None
    missing: list[str]
    """requirements that are not installed"""
    wrong_versions: list[WrongVersion]
    package: str | None
    """folder that import vllm gives"""
    import_error: str | None
    modules: dict[str, str | None]
    """where our files are imported from, by path"""
    gpus: list[str]
    gpu_error: str | None
    driver: bool
    """whether the machine has NVIDIA's driver"""
    decode: str
    """which decode this machine would get"""
    identity: str
    """what an engine reports"""

    @property
    def tree(self) -> Path | None:
        """The tree that the imported package lies in."""
        return Path(self.package).resolve().parent if self.package else None


@dataclass(frozen=True)
class Diagnosis:
    """An installation, and what is wrong with it."""

    facts: Facts
    faults: list[str]
    """each with what to do about it"""


def diagnose(python: str, stack: Stack) -> Diagnosis:
    """Ask the interpreter of an installation, and judge what it says."""
    facts = probe(python, stack)
    return Diagnosis(facts, faults(stack, facts))


def probe(python: str, stack: Stack) -> Facts:
    """Return what the installation's own interpreter says, from a neutral folder."""
    script = Path(__file__).with_name("probe.py")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    modules = sorted(it for it in stack.touched.union(stack.own) if it.endswith(".py"))
    note("importing vllm")
    with tempfile.TemporaryDirectory() as neutral:
        try:
            done = subprocess.run(
                [python, str(script), *modules],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=env,
                cwd=neutral,
                check=False,
            )
        except OSError as fault:
            raise StackError(
                f"cannot run {python}: {fault.strerror}: name the interpreter of the "
                "installation: --python PYTHON"
            ) from None
    # Libraries print what they like on the way; the answer is the last line.
    lines = done.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise StackError(f"{python} cannot be inspected: {last}") from None
    said["wrong_versions"] = [WrongVersion(**it) for it in said["wrong_versions"]]
    place = said["package"] and Path(said["package"]).resolve().parent
    marker = markers.read(place) if place else None
    said["identity"] = identity.reported(place, marker) if place else identity.UNKNOWN
    return Facts(**{it.name: said[it.name] for it in fields(Facts)})


def faults(stack: Stack, facts: Facts) -> list[str]:
    """Return what is wrong, a line each, with what to do about it."""
    wheel = _installed_wheel(facts)
    found = []
    if wheel is None:
        tree_fault = Tree(stack.places).fault(stack, platform.machine())
        found += [tree_fault] if tree_fault else []
    found += _package(stack, facts, wheel or stack.places.tree)
    if wheel is not None:
        found += _packed(stack, wheel)
    elif facts.tree is not None:
        found += _identity(stack, facts.tree)
    found += _binaries(stack, facts, wheel)
    found += [
        f"{it.name} {it.found} is installed, vllm needs {it.wanted}: "
        f"pip install '{it.wanted}'"
        for it in facts.wrong_versions
    ]
    if facts.missing:
        found.append(f"not installed: {some(facts.missing, 6)}: {_INSTALL}")
    if facts.driver and not facts.gpus and facts.torch:
        found.append(
            f"there is a GPU, but torch {facts.torch} does not see it: install the "
            f"CUDA build of torch and a driver for it ({facts.gpu_error})"
        )
    return found


def _installed_wheel(facts: Facts) -> Path | None:
    """Where a wheel of scripts/wheel.sh is installed; None if none is imported."""
    marker = markers.read(facts.tree) if facts.tree else None
    return facts.tree if marker and marker.source == WHEEL_SOURCE else None


def _package(stack: Stack, facts: Facts, root: Path) -> list[str]:
    """Where the package in `root` is not what Python imports."""
    expected = version.read(stack.places.tree)
    if facts.version is None:
        return [f"vllm is not installed for {facts.python}: {_INSTALL}"]
    found = []
    if facts.version != expected:
        found.append(
            f"vllm {facts.version} is installed, the tree is {expected}: {_INSTALL}"
        )
    package = root / "vllm"
    if facts.package is None:
        found.append(f"import vllm fails ({facts.import_error}): {_INSTALL}")
    elif Path(facts.package).resolve() != package.resolve():
        found.append(
            f"import vllm gives {facts.package}, not {package}: pip uninstall vllm, "
            f"then {_INSTALL}"
        )
    stray = [
        path
        for path, origin in facts.modules.items()
        if origin and Path(origin).resolve() != (root / path).resolve()
    ]
    if stray:
        found.append(
            f"modules come from elsewhere than the tree: {some(stray)}: {_INSTALL}"
        )
    return found


def _identity(stack: Stack, place: Path) -> list[str]:
    """Where an engine of the tree at `place` would report something else."""
    marker = markers.read(place)
    if marker is None or not marker.identity:
        return [
            f"{place} does not say which stack it was made from, so an engine "
            f"reports '{identity.UNKNOWN}': run scripts/apply.sh, then {_INSTALL}"
        ]
    found = []
    changed = identity.edited(place, marker)
    if place == stack.places.tree.resolve():
        # What differs in the tree itself is named already, but for own files.
        changed = [path for path in changed if path in stack.own]
    elif (marker.base, marker.digest) != (stack.base.version, stack.digest):
        found.append(
            f"{place} was made from vLLM {marker.base}, stack {marker.digest[:12]}; "
            f"this stack is for vLLM {stack.base.version}, {stack.digest[:12]}: "
            f"{_INSTALL}"
        )
    if changed:
        found.append(
            f"edited since apply ({some(changed)}), so an engine reports "
            f"{identity.reported(place, marker)}: run scripts/apply.sh"
        )
    unlisted = sorted(set(identity.ours(stack)).symmetric_difference(marker.files))
    if marker.digest == stack.digest and unlisted:
        found.append(
            f"the marker of {place} disagrees with the stack on {some(unlisted)}: "
            "run scripts/apply.sh"
        )
    return found


def _packed(stack: Stack, place: Path) -> list[str]:
    """Where the wheel installed in `place` is not of this stack, or was edited."""
    marker = markers.read(place)
    if marker is None:
        return []
    found = []
    own = [path for path in stack.own if path.startswith(identity.PACKAGE)]
    ours = identity.files(own, stack.places.tree)
    if marker.digest != stack.digest or not ours.items() <= marker.files.items():
        found.append(
            f"{place} was packed from another stack ({marker.identity}): {_REINSTALL}"
        )
    changed = identity.edited(place, marker)
    if changed:
        found.append(
            f"edited since it was installed ({some(changed)}), so an engine reports "
            f"{identity.reported(place, marker)}: {_REINSTALL}"
        )
    return found


def _binaries(stack: Stack, facts: Facts, wheel: Path | None) -> list[str]:
    place = wheel or stack.places.tree
    if wheel is None:
        laid = {path: it.sha256 for path, it in read_wheel_files(place).items()}
        remedy = "scripts/apply.sh --discard-edits"
    else:
        record = wheel / f"vllm-{facts.version}.dist-info" / "RECORD"
        laid = archive.recorded(record.read_text(encoding="utf-8"))
        remedy = _REINSTALL
    libraries = {path: it for path, it in laid.items() if path.endswith(".so")}
    ticker = Ticker("checking compiled files")
    wrong = []
    for at, (path, digest) in enumerate(libraries.items()):
        if not (place / path).is_file() or file_sha256(place / path) != digest:
            wrong.append(path)
        ticker.tick(f"{at + 1} of {len(libraries)}")
    if not wrong:
        return []
    return [f"{some(wrong)} differ from the release wheel: {remedy}"]


def _in_the_log_alone() -> str:
    """What the environment leaves of an engine's report; empty if all."""
    if os.environ.get(_RUST_FRONT_END, "0") in ("", "0"):
        return ""
    return f", in the log alone: {_RUST_FRONT_END} takes vLLM's Rust front end"


def words(stack: Stack, facts: Facts) -> list[str]:
    """Return the facts for people, a line each."""
    versions = ", ".join(f"{name} {it}" for name, it in facts.versions.items() if it)
    vllm = f"{facts.version} in {facts.package}"
    return [
        f"stack    vLLM {stack.base.version}, stack {stack.digest[:12]}",
        f"reports  {facts.identity}{_in_the_log_alone()}",
        f"python   {facts.python} ({facts.python_version})",
        f"vllm     {vllm if facts.version else 'not installed'}",
        f"with     {versions or 'none of the packages it builds on'}",
        f"GPU      {', '.join(facts.gpus) or 'none that torch sees'}",
        f"decode   {facts.decode}",
    ]
