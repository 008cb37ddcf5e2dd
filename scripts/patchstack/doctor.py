"""`doctor`: is this installation the fork, whole, and what will it decode with?"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from . import apply, archive, checks, identity, stack, tree
from .base import file_sha256
from .errors import StackError, count, some
from .progress import Ticker, note
from .stack import Stack

_INSTALL = "pip install -e vllm"
_REINSTALL = "install the wheel that scripts/wheel.sh makes now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check an installation of the fork: the tree, the package that Python "
        "imports, compiled files, versions against the release's pins, the GPU."
    )
    parser.add_argument(
        "--python",
        default="python3",
        metavar="PYTHON",
        help="the interpreter of the installation (default: %(default)s on PATH)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="as JSON on stdout (docs/schemas/doctor.v1.json)",
    )


def run(repo: Path, options: argparse.Namespace) -> int:
    loaded = stack.load(repo)
    facts = probe(options.python, loaded)
    facts["identity"] = _reported(facts)
    found = faults(loaded, facts)
    if options.json:
        print(json.dumps({"facts": facts, "faults": found}, indent=1))
    else:
        print("\n".join([*_words(loaded, facts), *(f"FAULT    {it}" for it in found)]))
        if found:
            raise StackError(
                f"{count(len(found), 'fault')}: mend each as its line says"
            )
    return 1 if found else 0


def probe(python: str, loaded: Stack) -> dict[str, Any]:
    """What the installation's own interpreter says, from a neutral folder."""
    script = Path(__file__).with_name("probe.py")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    modules = sorted({*loaded.touched, *loaded.own})
    note("importing vllm")
    with tempfile.TemporaryDirectory() as neutral:
        try:
            done = subprocess.run(
                [python, str(script), *(it for it in modules if it.endswith(".py"))],
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
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines() or ["no message"]
        raise StackError(f"{python} cannot be inspected: {said[-1]}") from None


def faults(loaded: Stack, facts: dict[str, Any]) -> list[str]:
    """What is wrong, a line each, with what to do about it."""
    found = []
    wheel = _installed_wheel(facts)
    if wheel is None:
        tree_fault = apply.check(loaded, platform.machine())
        if tree_fault:
            found.append(tree_fault)
    found += _package(loaded, facts, wheel or loaded.places.tree)
    found += _identity(loaded, facts) if wheel is None else _packed(loaded, wheel)
    found += _binaries(loaded, facts, wheel)
    found += _requirements(facts)
    if facts["driver"] and not facts["gpus"] and facts["torch"]:
        found.append(
            f"there is a GPU, but torch {facts['torch']} does not see it: install the "
            f"CUDA build of torch and a driver for it ({facts['gpu_error']})"
        )
    return found


def _installed_wheel(facts: dict[str, Any]) -> Path | None:
    """Where a wheel of scripts/wheel.sh is installed; None if none is imported."""
    if facts["package"] is None:
        return None
    place = _imported_tree(facts)
    marker = tree.read_marker(place)
    return place if marker and marker.source == tree.WHEEL_SOURCE else None


def _package(loaded: Stack, facts: dict[str, Any], root: Path) -> list[str]:
    """Where the package in `root` is not what Python imports."""
    expected = checks.own_version(loaded.places.tree)
    if facts["version"] is None:
        return [f"vllm is not installed for {facts['python']}: {_INSTALL}"]
    found = []
    if facts["version"] != expected:
        found.append(
            f"vllm {facts['version']} is installed, the tree is {expected}: {_INSTALL}"
        )
    package = root / "vllm"
    if facts["package"] is None:
        found.append(f"import vllm fails ({facts['import_error']}): {_INSTALL}")
    elif Path(facts["package"]).resolve() != package.resolve():
        found.append(
            f"import vllm gives {facts['package']}, not {package}: pip uninstall vllm, "
            f"then {_INSTALL}"
        )
    stray = [
        path
        for path, origin in facts["modules"].items()
        if origin and Path(origin).resolve() != (root / path).resolve()
    ]
    if stray:
        found.append(
            f"modules come from elsewhere than the tree: {some(stray)}: {_INSTALL}"
        )
    return found


def _identity(loaded: Stack, facts: dict[str, Any]) -> list[str]:
    """Where an engine would report something else than this stack."""
    if facts["package"] is None:
        return []
    place, ours = _imported_tree(facts), loaded.places.tree.resolve()
    marker = tree.read_marker(place)
    if marker is None or not marker.identity:
        return [
            f"{place} does not say which stack it was made from, so an engine "
            f"reports '{identity.UNKNOWN}': run scripts/apply.sh, then {_INSTALL}"
        ]
    found = []
    changed = identity.edited(place, marker)
    if place == ours:
        # What differs in the tree itself is named already, but for own files.
        changed = [path for path in changed if path in loaded.own]
    elif (marker.base, marker.digest) != (loaded.base.version, loaded.digest):
        found.append(
            f"{place} was made from vLLM {marker.base}, stack {marker.digest[:12]}; "
            f"this stack is for vLLM {loaded.base.version}, {loaded.digest[:12]}: "
            f"{_INSTALL}"
        )
    if changed:
        found.append(
            f"edited since apply ({some(changed)}), so an engine reports "
            f"{identity.reported(place, marker)}: run scripts/apply.sh"
        )
    unlisted = sorted(set(identity.ours(loaded)).symmetric_difference(marker.files))
    if marker.digest == loaded.digest and unlisted:
        found.append(
            f"the marker of {place} disagrees with the stack on {some(unlisted)}: "
            "run scripts/apply.sh"
        )
    return found


def _packed(loaded: Stack, place: Path) -> list[str]:
    """Where the wheel installed in `place` is not of this stack, or was edited."""
    marker = tree.read_marker(place)
    if marker is None:
        return []
    found = []
    ours = {
        path: file_sha256(loaded.places.tree / path)
        for path in loaded.own
        if path.startswith(identity.PACKAGE)
    }
    if marker.digest != loaded.digest or not ours.items() <= marker.files.items():
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


def _imported_tree(facts: dict[str, Any]) -> Path:
    return Path(facts["package"]).resolve().parent


def _reported(facts: dict[str, Any]) -> str:
    if facts["package"] is None:
        return identity.UNKNOWN
    place = _imported_tree(facts)
    return identity.reported(place, tree.read_marker(place))


def _binaries(loaded: Stack, facts: dict[str, Any], wheel: Path | None) -> list[str]:
    place = wheel or loaded.places.tree
    if wheel is None:
        laid = {path: it.sha256 for path, it in tree.read_wheel_files(place).items()}
        remedy = "scripts/apply.sh --discard-edits"
    else:
        record = wheel / f"vllm-{facts['version']}.dist-info" / "RECORD"
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


def _requirements(facts: dict[str, Any]) -> list[str]:
    found = [
        f"{it['name']} {it['found']} is installed, vllm needs {it['wanted']}: "
        f"pip install '{it['wanted']}'"
        for it in facts["wrong_versions"]
    ]
    if facts["missing"]:
        found.append(f"not installed: {some(facts['missing'], 6)}: {_INSTALL}")
    return found


def _words(loaded: Stack, facts: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {it}" for name, it in facts["versions"].items() if it)
    gpus = ", ".join(facts["gpus"]) or "none that torch sees"
    vllm = f"{facts['version']} in {facts['package']}"
    return [
        f"stack    vLLM {loaded.base.version}, stack {loaded.digest[:12]}",
        f"reports  {facts['identity']}",
        f"python   {facts['python']} ({facts['python_version']})",
        f"vllm     {vllm if facts['version'] else 'not installed'}",
        f"with     {versions or 'none of the packages it builds on'}",
        f"GPU      {gpus}",
        f"decode   {facts['decode']}",
    ]
