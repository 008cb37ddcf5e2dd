"""Build backend of the tree: an editable install of what scripts/apply.sh made.

It refuses every tree that is not whole, because the failure would otherwise show
only when the package is used.  The rest is setuptools.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from setuptools import build_meta

_Settings = Mapping[str, str | list[str] | None] | None

_TREE = Path(__file__).resolve().parent
_APPLY = "run scripts/apply.sh, then pip install -e vllm"


def _refuse_unless_applied() -> None:
    try:
        marker = json.loads((_TREE / ".stack.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        sys.exit(f"error: this tree is not applied: {_APPLY}")
    scripts = _TREE.parent / "scripts"
    # A tree that was copied away from its stack has only the marker to go by.
    if not (scripts / "patchstack").is_dir():
        return
    sys.path.insert(0, str(scripts))
    # Half written bytecode, from a full disk, would break the scripts themselves.
    sys.dont_write_bytecode = True
    from patchstack import stack
    from patchstack.errors import StackError

    try:
        digest = stack.load(_TREE.parent).digest
    except StackError as fault:
        sys.exit(f"error: {fault}")
    if marker.get("digest") != digest:
        sys.exit(f"error: this tree was made from another stack: {_APPLY}")


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    _refuse_unless_applied()
    needed: list[str] = build_meta.get_requires_for_build_editable(config_settings)
    return needed


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: _Settings = None
) -> str:
    _refuse_unless_applied()
    folder: str = build_meta.prepare_metadata_for_build_editable(
        metadata_directory, config_settings
    )
    return folder


def build_editable(
    wheel_directory: str,
    config_settings: _Settings = None,
    metadata_directory: str | None = None,
) -> str:
    _refuse_unless_applied()
    wheel: str = build_meta.build_editable(
        wheel_directory, config_settings, metadata_directory
    )
    return wheel


def get_requires_for_build_wheel(config_settings: _Settings = None) -> NoReturn:
    _refuse_unless_applied()
    sys.exit(
        "error: this tree installs in place: pip install -e vllm, or make a wheel: "
        "scripts/wheel.sh"
    )


def build_wheel(
    wheel_directory: str,
    config_settings: _Settings = None,
    metadata_directory: str | None = None,
) -> NoReturn:
    get_requires_for_build_wheel(config_settings)


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> NoReturn:
    get_requires_for_build_wheel(config_settings)
