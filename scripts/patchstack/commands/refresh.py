"""`refresh`: edits into patches, the patches in order, the list of own files."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from ..errors import StackError
from ..refresh import ownership, series
from ..refresh.fold import fold
from ..refresh.words import Words
from ..stack import Places, Stack, load
from ..tree import place
from . import as_json, schema_option


@dataclass(frozen=True)
class Refreshed:
    """What became of the stack."""

    done: list[str]
    """what was written, a line each"""
    digest: str
    """of the stack as it is now"""


PRINTS = {"refresh.v1": Refreshed}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Turn edits of upstream's files in vllm/ into a new patch, or fold them into "
        "the named one. Without TOPIC each edit goes to the patch of its file. "
        "docs/patches.md has a maintainer's days with it."
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="the patch's topic")
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="only the edits of these files"
    )
    modes = parser.add_argument_group("instead").add_mutually_exclusive_group()
    modes.add_argument(
        "--own", nargs="+", metavar="FILE", help="take files of vllm/ as our own"
    )
    modes.add_argument(
        "--disown", nargs="+", metavar="FILE", help="take own files off the list"
    )
    modes.add_argument("--drop", nargs="+", metavar="TOPIC", help="take patches out")
    modes.add_argument(
        "--move", metavar="TOPIC", help="move a patch, --before another or to the end"
    )
    modes.add_argument(
        "--reseal",
        action="store_true",
        help="put right patches that were edited by hand, merged or reordered",
    )
    modes.add_argument(
        "--import",
        dest="file",
        type=Path,
        metavar="FILE",
        help="take a patch that git wrote, as TOPIC, with its author, date and message",
    )
    parser.add_argument("--before", metavar="TOPIC", help="where --move puts a patch")
    text = parser.add_argument_group(
        "words", "of a new patch all needed but author and body; else they replace"
    )
    text.add_argument("--subject", help="what the patch does, as an order")
    text.add_argument("--body", help="more about it")
    text.add_argument(
        "--author", metavar="'NAME <ADDRESS>'", help="(default: as git's settings say)"
    )
    text.add_argument(
        "--why", help="the reason (with --own: for taking an upstream file's place)"
    )
    text.add_argument("--upstream-status", help="none, filed WHERE, merged in VERSION")
    text.add_argument("--drop-when", help="what passes on a newer base without it")
    text.add_argument("--tests", help="the tests that guard it")
    parser.add_argument("--json", action="store_true", help=schema_option("refresh"))


def run(repo: Path, options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if options.before and not options.move:
        raise StackError("--before goes with --move: it says where the patch goes")
    with place.locked(Places(repo)):
        done = _do(load(repo), options)
    if options.json:
        print(as_json(Refreshed(done, load(repo).digest)))
    else:
        print("\n".join(done) or "nothing to do")
    return 0


def _do(stack: Stack, options: argparse.Namespace) -> list[str]:
    words = Words(
        options.subject,
        options.body,
        options.author,
        {
            "Why": options.why,
            "Upstream-status": options.upstream_status,
            "Drop-when": options.drop_when,
            "Tests": options.tests,
        },
    )
    if options.own:
        return ownership.take(stack, options.own, options.why)
    if options.disown:
        return ownership.give_up(stack, options.disown)
    return _do_series(stack, options, words)


def _do_series(stack: Stack, options: argparse.Namespace, words: Words) -> list[str]:
    if options.drop:
        return series.drop(stack, options.drop)
    if options.move:
        return series.move(stack, options.move, options.before)
    if options.reseal:
        return series.reseal(stack)
    if options.file:
        return series.take(stack, options.file, options.topic, options.paths, words)
    return fold(stack, options.topic, options.paths, words)
