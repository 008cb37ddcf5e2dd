"""`doctor`: is this installation the fork, whole, and what will it decode with?"""

import argparse
from pathlib import Path

from ..check import doctor
from ..errors import StackError, count
from ..stack import load
from . import as_json, schema_option

PRINTS = {"doctor.v1": doctor.Diagnosis}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
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
    parser.add_argument("--json", action="store_true", help=schema_option("doctor"))


def run(repo: Path, options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    stack = load(repo)
    found = doctor.diagnose(options.python, stack)
    if options.json:
        print(as_json(found))
        return 1 if found.faults else 0
    lines = doctor.words(stack, found.facts)
    print("\n".join([*lines, *(f"FAULT    {it}" for it in found.faults)]))
    if found.faults:
        faults = count(len(found.faults), "fault")
        raise StackError(f"{faults}: mend each as its line says")
    return 0
