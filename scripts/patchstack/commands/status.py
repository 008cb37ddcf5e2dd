"""`status`: base, series, edits, own files and drift, in words or as JSON."""

import argparse
import platform
from dataclasses import dataclass
from pathlib import Path

from ..check import rules, status
from ..errors import StackError, count
from ..stack import Stack, load
from . import as_json, schema_option


@dataclass(frozen=True)
class Checked:
    """With --check."""

    faults: list[str]
    """each with what to do about it"""


PRINTS = {"status.v1": status.Status, "status-check.v1": Checked}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = "Show the base, the series, local edits, own files and drift."
    parser.add_argument(
        "--check",
        action="store_true",
        help="check every rule of the stack; exit code 1 if one is broken",
    )
    parser.add_argument("--json", action="store_true", help=schema_option("status"))


def run(repo: Path, options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    stack = load(repo)
    if options.check:
        return _check(stack, options.json)
    found = status.collect(stack)
    print(as_json(found) if options.json else status.words(found))
    return 0


def _check(stack: Stack, json: bool) -> int:
    found = rules.faults(stack, platform.machine())
    if json:
        print(as_json(Checked(found)))
    elif not found:
        print(f"{len(rules.RULES) + 1} rules hold (stack {stack.digest[:12]})")
    else:
        print("\n".join(found))
        raise StackError(f"{count(len(found), 'fault')}: mend each as its line says")
    return 1 if found else 0
