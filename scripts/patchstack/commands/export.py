"""`export`: the whole fork as one mailbox, for plain `git am` on a clean base."""

import argparse
from pathlib import Path

from .. import export
from ..errors import StackError, count
from ..files import write
from ..stack import Places, load
from ..tree import place
from . import as_json, schema_option

PRINTS = {"export.v1": export.Exported}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Write the whole fork, own files and patches, as one mailbox. 'git am OUT' on "
        "a clean base (upstream's repository at the base's tag) makes the tree that "
        "apply makes, what only the sdist or the wheel brings aside."
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the mailbox to write")
    parser.add_argument("--offline", action="store_true", help="use only the cache")
    parser.add_argument("--json", action="store_true", help=schema_option("export"))


def run(repo: Path, options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    out: Path = options.out
    if out.is_dir() or not out.parent.is_dir():
        raise StackError(f"{out} cannot be written as a file: name another OUT")
    with place.locked(Places(repo)):
        exported, box = export.export(load(repo), options.offline)
    write(out, box)
    if options.json:
        print(as_json(exported))
    else:
        mails = count(exported.mails, "mail")
        print(f"{out}: {mails} for vLLM {exported.base}")
    return 0
