"""Writes `docs/schemas/` of the tool's commands from the dataclasses they print.

python tests/patchstack/write_schemas.py
"""

import importlib
import json
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "docs" / "schemas"
COMMANDS = ("apply", "refresh", "status", "doctor", "rebase", "export")
CONFIG = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    json_schema_serialization_defaults_required=True,
)


def schemas() -> dict[str, str]:
    """Text of each schema, by the name of its file."""
    commands = {
        it: importlib.import_module(f"patchstack.commands.{it}") for it in COMMANDS
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("patchstack."):
            for it in vars(module).values():
                if isinstance(it, type) and is_dataclass(it):
                    it.__pydantic_config__ = CONFIG
    return {
        f"{name}.json": _text(name, command, printed)
        for command, module in commands.items()
        for name, printed in module.PRINTS.items()
    }


def _text(name: str, command: str, printed: Any) -> str:
    check = " --check" if "check" in name else ""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": name,
        "title": f"scripts/{command}.sh{check} --json",
    }
    body = TypeAdapter(printed).json_schema(mode="serialization")
    return json.dumps(head | _plain(body | {"title": head["title"]}), indent=2) + "\n"


def _plain(part: Any) -> Any:
    """Names as they are printed, and no titles that repeat them."""
    if isinstance(part, list):
        return [_plain(it) for it in part]
    if not isinstance(part, dict):
        return part.rstrip("_") if isinstance(part, str) else part
    shown = {k: v for k, v in part.items() if k != "title" or not isinstance(v, str)}
    return {key.rstrip("_"): _plain(value) for key, value in shown.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(REPO / "scripts"))
    for file, text in schemas().items():
        (FOLDER / file).write_text(text)
