"""The commands: each parses its options, calls one function and prints.

A command has `add_arguments` and `run`, and names what its `--json` prints in
`PRINTS`, from which `docs/schemas/` is written.
"""

import json
from dataclasses import asdict
from typing import Any


def as_json(document: Any) -> str:
    """Return a dataclass as JSON; names that Python reserves lose their `_`."""
    facts = {key.rstrip("_"): value for key, value in asdict(document).items()}
    return json.dumps(facts, indent=1)


def schema_option(name: str) -> str:
    """Return the help of `--json`."""
    return f"result as JSON on stdout (docs/schemas/{name}.v1.json)"
