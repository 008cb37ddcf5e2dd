"""`rebase`: try the stack on another release, and take it there when accepted."""

import argparse
import re
from pathlib import Path

from ..errors import StackError
from ..files import write
from ..rebase import report
from ..rebase import work as works
from ..rebase.accept import accept
from ..rebase.report import Aborted, Accepted, Current, Report
from ..rebase.trial import State
from ..rebase.work import Work
from ..release import fetch
from ..stack import Places, load
from ..tree import place
from . import as_json, schema_option

PRINTS = {"rebase.v1": Report | Current | Accepted | Aborted}
EXIT_CODES = {State.CONFLICT: 3, State.DRIFT: 4, State.OBSOLETE: 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = """\
Try the stack on another release. Nothing is written to the stack until --accept.
On its own release it settles what refresh.sh --reseal, --drop or --move could not.

Each patch is clean, re-anchored (its file has changed, the edit has its place),
in conflict, obsolete (upstream has the edit) or in drift (it fits, but what it
or our own files use of upstream has changed). Conflicts lie in .rebase/files/:
settle them there (or delete a file to leave its edits out), then --continue."""
    parser.epilog = """\
exit codes, the first that holds:
  3  a patch is in conflict
  4  drift, or an own file's upstream text or the requirements have changed
  5  a patch is obsolete
  0  none of these: every patch is clean, re-anchored or resolved; or accepted
  1  an error; 2 wrong usage"""
    parser.add_argument(
        "version", nargs="?", metavar="VERSION", help="a release, or: latest"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE|DIR|GIT-URL@TAG",
        help="the release as an sdist, a source folder or a clone (default: the "
        "sdist from the package index, cached)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="take the conflicts settled in .rebase/files/ and look again",
    )
    mode.add_argument(
        "--accept",
        action="store_true",
        help="rewrite upstream.toml, patches and version, and apply",
    )
    mode.add_argument(
        "--abort", action="store_true", help="forget the rebase; the stack stays"
    )
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="TOPIC|PATH",
        help="leave out a patch, or the edits of one file (may be repeated)",
    )
    parser.add_argument("--offline", action="store_true", help="use only the cache")
    parser.add_argument("--json", action="store_true", help=schema_option("rebase"))
    parser.add_argument(
        "--markdown", metavar="FILE", type=Path, help="write the report to a file too"
    )


def run(repo: Path, options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    _refuse_nonsense(options)
    places = Places(repo)
    with place.locked(places):
        if options.abort:
            works.abort(places)
            _print(options.json, Aborted(), "the rebase is forgotten")
            return 0
        stack = load(repo)
        version = options.version
        if version == "latest":
            version = fetch.newest()
            if version == stack.base.version:
                said = f"vLLM {version}, which the stack is for, is the newest release"
                _print(options.json, Current(version, version), said)
                return 0
        if version:
            Work.start(stack, version, options.source, options.offline)
        work = Work.load(stack)
        work.drop(options.drop)
        if options.go_on:
            work.take()
        tried = work.look()
        found = report.report(tried)
        page = report.markdown(found)
        if options.markdown:
            write(options.markdown, page.encode())
        if options.accept:
            done = accept(work, tried, options.offline)
            then = "next: mend what drifted, scripts/test.sh, commit"
            _print(options.json, Accepted(done), "\n".join([*done, then]))
            return 0
    _print(options.json, found, f"{page}\nnext: {works.next_step(tried)}")
    return EXIT_CODES.get(tried.state, 0)


def _refuse_nonsense(options: argparse.Namespace) -> None:
    under_way = options.go_on or options.accept or options.abort
    if bool(options.version) == under_way:
        raise StackError(
            "say what to do: scripts/rebase.sh VERSION, or --continue, --accept or "
            "--abort for the rebase under way"
        )
    if under_way and options.source:
        raise StackError("--from goes with VERSION: it says where the release is")
    # As PEP 440 has them, roughly: what it is called decides nothing else.
    wanted = options.version or "latest"
    if wanted != "latest" and not re.fullmatch(r"\d+(\.\d+)*[a-z0-9.+]*", wanted):
        raise StackError(
            f"{options.version!r} is no release: say one, such as 0.33.0, or latest"
        )


def _print(
    json: bool, document: Report | Current | Accepted | Aborted, words: str
) -> None:
    print(as_json(document) if json else words)
