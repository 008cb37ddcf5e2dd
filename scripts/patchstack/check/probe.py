"""Run by `doctor` with the interpreter of the installation: prints facts as JSON.

Alone in its file, because that interpreter knows nothing of patchstack.
Arguments are module files relative to the tree, such as `vllm/version.py`.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
from typing import Any

SHOWN = ("torch", "triton", "flashinfer-python", "cuda-python", "cuda-bindings")
DEPLOYMENT = "vllm.models.deepseek_v41.nvidia.specialized_decode.deployment"


def installed(name: str) -> str | None:
    """Return the version of an installed package; None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def one_line(error: Exception) -> str:
    """Return an exception in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def package_facts(files: list[str]) -> dict[str, Any]:
    """Return where vllm and our modules in it are imported from."""
    facts: dict[str, Any] = {"package": None, "import_error": None, "modules": {}}
    try:
        import vllm  # type: ignore[import-not-found, unused-ignore]
    except Exception as error:
        facts["import_error"] = one_line(error)
        return facts
    facts["package"] = next(iter(vllm.__path__), None)
    for file in files:
        if not file.startswith("vllm/"):
            continue
        name = re.sub(r"(/__init__)?\.py$", "", file).replace("/", ".")
        try:
            spec = importlib.util.find_spec(name)
        except Exception:
            # A parent package that needs a GPU: its path says where it is from.
            continue
        facts["modules"][file] = spec.origin if spec else "nowhere"
    return facts


def requirement_facts() -> dict[str, Any]:
    """Return which requirements of vllm are not met."""
    facts: dict[str, Any] = {"missing": [], "wrong_versions": []}
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import (  # type: ignore[import-not-found, no-redef, unused-ignore]
            Requirement,
        )
    try:
        lines = importlib.metadata.requires("vllm") or []
    except importlib.metadata.PackageNotFoundError:
        return facts
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = installed(wanted.name)
        if found is None:
            facts["missing"].append(wanted.name)
        elif not wanted.specifier.contains(found, prereleases=True):
            pinned = f"{wanted.name}{wanted.specifier}"
            facts["wrong_versions"].append(
                {"name": wanted.name, "found": found, "wanted": pinned}
            )
    return facts


def gpu_facts() -> dict[str, Any]:
    """Return the GPUs that torch sees, or why it sees none."""
    facts: dict[str, Any] = {
        "gpus": [],
        "gpu_error": None,
        "driver": bool(shutil.which("nvidia-smi")),
    }
    try:
        import torch

        facts["gpus"] = [
            torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())
        ]
        if not facts["gpus"]:
            torch.cuda.init()  # type: ignore[no-untyped-call, unused-ignore]
    except Exception as error:
        facts["gpu_error"] = one_line(error)
    return facts


def decode_facts() -> str:
    """Return which decode this machine would get."""
    try:
        return str(importlib.import_module(DEPLOYMENT).describe_platform())
    except Exception as error:
        return f"unknown ({one_line(error)})"


def main() -> None:
    """Print the facts."""
    facts = {
        "python": sys.executable,
        "python_version": sys.version.split()[0],
        "version": installed("vllm"),
        "versions": {name: installed(name) for name in SHOWN},
        "torch": installed("torch"),
        **requirement_facts(),
        **package_facts(sys.argv[1:]),
        **gpu_facts(),
    }
    facts["decode"] = decode_facts() if facts["package"] else "vllm does not import"
    print("\n" + json.dumps(facts))


if __name__ == "__main__":
    main()
