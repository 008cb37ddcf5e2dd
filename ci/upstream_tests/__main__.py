"""Run upstream's tests that guard what we touch, on the base and on the fork.

A test that passes on the pristine base and not on the fork is our fault.  What
fails on both, or needs what is not here, says nothing about us.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cli
from cli import Fault
from patchstack import stack
from patchstack.errors import count
from patchstack.release import fetch
from patchstack.stack import Stack

from . import guards, trees
from .session import HERE, Runner, Session

GPU_WORKERS = 8
"""Files at a time: starting up takes most of them longer than their tests."""


def parser() -> argparse.ArgumentParser:
    """The command line of `scripts/test.sh upstream`."""
    made = argparse.ArgumentParser(
        prog="scripts/test.sh upstream",
        description="Run upstream's tests that guard what the fork touches (listed in "
        "tests/upstream/) on the pristine base and on the fork. Exit code 1 if a test "
        "passes on the base and not on the fork.",
    )
    made.add_argument("--gpu", action="store_true", help="the list for a GPU machine")
    made.add_argument(
        "--json",
        action="store_true",
        help="result as JSON on stdout (docs/schemas/upstream.v1.json)",
    )
    made.add_argument(
        "--fresh", action="store_true", help="run the base again, whatever is cached"
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="keep the logs, every test's outcome and the result (result.json) here",
    )
    made.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes at a time (default: one a core, 8 on a GPU)",
    )
    made.add_argument(
        "--file-seconds",
        type=float,
        default=120,
        metavar="S",
        help="with --gpu: stop a test file after S seconds (default: 120)",
    )
    return made


def run(options: argparse.Namespace) -> int:
    """Run the tests on both trees and say which ones the fork has lost."""
    if (options.workers or 1) < 1 or options.file_seconds <= 0:
        raise Fault("--workers and --file-seconds: give more than 0")
    loaded = stack.load(cli.REPO)
    bundle = trees.bundle()
    fork_tree = trees.fork(loaded, bundle)
    name = "gpu" if options.gpu else "cpu"
    listed = guards.load(cli.REPO / "tests" / "upstream" / f"{name}.toml")
    gone = guards.missing(listed, fork_tree.tests)
    if gone:
        again = "pack the bundle again" if bundle else "run scripts/apply.sh"
        raise Fault(
            f"tests/upstream/{name}.toml lists {gone[0]}, which is not in "
            f"{fork_tree.tests.name}/: {again}, or take it off the list"
        )
    paths = [guard.path for guard in listed]
    workers = options.workers or (GPU_WORKERS if options.gpu else os.cpu_count() or 1)
    runner = Runner(options.gpu, workers, options.file_seconds)
    cache = fetch.cache_folder() / "upstream-tests"
    out = options.out or cache
    for folder in (cache, out):
        folder.mkdir(parents=True, exist_ok=True)
    cached = cache / f"base-{name}-{key(loaded, runner, paths)[:16]}.json"
    base = None if options.fresh else read(cached)
    from_cache = base is not None
    if base is None:
        with trees.base(loaded, bundle, cache) as tree:
            base = runner.run("base", tree, paths, out / "base.log")
        write(cached, asdict(base))
    write(out / "base.json", asdict(base))
    if "passed" not in base.counts():
        raise Fault(
            f"no test passes on the base: see {out / 'base.log'}; the list guards "
            "nothing here"
        )
    log = out / "fork.log"
    fork = runner.run("fork", fork_tree, paths, log)
    write(out / "fork.json", asdict(fork))
    lost = compare(base, fork)
    facts = {
        "list": name,
        "machine": machine(),
        "stack": trees.identity_of(fork_tree),
        "base": {"cached": from_cache, **_facts(base)},
        "fork": _facts(fork),
        "idle": idle(listed, base),
        "lost": [{"test": test, "fork": how} for test, how in lost.items()],
        "log": str(log),
    }
    write(out / "result.json", facts)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print("\n".join(_words(listed, base, from_cache, fork, lost, log)))
    return cli.FOUND if lost else 0


def write(place: Path, value: object) -> None:
    """Write `value` as JSON."""
    place.write_text(json.dumps(value, indent=1) + "\n")


def machine() -> dict[str, str | None]:
    """What the tests ran on: GPU, Python and the versions that decide."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")
    except FileNotFoundError:
        gpus = []
    return {
        "gpu": ", ".join(filter(None, gpus)) or None,
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": version("triton"),
    }


def key(loaded: Stack, runner: Runner, paths: Sequence[str]) -> str:
    """What the base's outcomes depend on: the release, the list, what runs it."""
    base = loaded.base
    packages = sorted(
        f"{it.name} {it.version}"
        for it in importlib.metadata.distributions()
        if it.name != "vllm"
    )
    ours = sorted([*HERE.glob("*.py"), *HERE.glob("models/**/*.json")])
    runs = [f"{runner.file_s:g}", *(place.read_text() for place in ours)]
    wheel = base.wheel(platform.machine()).sha256
    facts = [base.sdist.sha256, wheel, sys.version, *paths, *packages, *runs]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def read(place: Path) -> Session | None:
    """A cached session; None if there is none that can be read."""
    try:
        return Session(**json.loads(place.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def compare(base: Session, fork: Session) -> dict[str, str]:
    """Tests that pass on the base only -> what they do on the fork.

    Where a file's process was cut short on both, how far it came is no one's fault.
    """
    both_cut = base.cut.keys() & fork.cut.keys()
    return {
        test: fork.outcomes.get(test, "did not run")
        for test, outcome in base.outcomes.items()
        if outcome == "passed"
        and fork.outcomes.get(test) != "passed"
        and (test in fork.outcomes or test.partition("::")[0] not in both_cut)
    }


def idle(listed: Sequence[guards.Guard], base: Session) -> list[str]:
    """Listed paths of which no test passes on the base: they guard nothing here."""
    passed = [test for test, outcome in base.outcomes.items() if outcome == "passed"]
    return [it.path for it in listed if not any(t.startswith(it.path) for t in passed)]


def _facts(session: Session) -> dict[str, Any]:
    facts = {"seconds": round(session.seconds, 1), **session.counts()}
    return facts | {"cut": dict(session.cut)}


def _words(
    listed: Sequence[guards.Guard],
    base: Session,
    from_cache: bool,
    fork: Session,
    lost: Mapping[str, str],
    log: Path,
) -> list[str]:
    def line(session: Session) -> str:
        return ", ".join(f"{n} {outcome}" for outcome, n in session.counts().items())

    whence = "cached" if from_cache else f"{base.seconds:.0f} s"
    lines = [
        f"base  {line(base)} ({whence})",
        f"fork  {line(fork)} ({fork.seconds:.0f} s)",
    ]
    for which, session in (("base", base), ("fork", fork)):
        for path, how in session.cut.items():
            lines.append(f"cut   {path}: {how} on the {which}")
    for path in idle(listed, base):
        lines.append(f"idle  {path}: no test of it passes on the base")
    for test, how in lost.items():
        lines.append(f"LOST  {test}: passes on the base, {how} here")
    if lost:
        lines.append(f"{count(len(lost), 'test')} lost: see {log}")
    return lines


if __name__ == "__main__":
    sys.exit(cli.run(parser().parse_args, run))
