"""Checks JSON output against its schema in docs/schemas."""

import json
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"


def conforming(name: str, document: Any) -> Any:
    """The document; raises `jsonschema.ValidationError` where it breaks its schema.

    `name` is that of the schema, such as `status.v1`.
    """
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    checker = jsonschema.Draft202012Validator
    checker.check_schema(schema)
    checker(schema).validate(document)
    return document
