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
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchstack import fetch, source, stack
from patchstack.archive import Wheel
from patchstack.errors import StackError, count
from patchstack.progress import note
from patchstack.stack import Stack

from . import guards
from .session import HERE, Runner, Session

REPO = HERE.parents[1]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test.sh upstream",
        description="Run upstream's tests that guard what the fork touches (listed in "
        "tests/upstream/) on the pristine base and on the fork. Exit code 1 if a test "
        "passes on the base and not on the fork.",
    )
    parser.add_argument("--gpu", action="store_true", help="the list for a GPU machine")
    parser.add_argument("--json", action="store_true", help="result as JSON on stdout")
    parser.add_argument(
        "--fresh", action="store_true", help="run the base again, whatever is cached"
    )
    options = parser.parse_args(argv)
    try:
        return run(options)
    except StackError as fault:
        print(f"error: {fault}", file=sys.stderr)
        # 1 is for tests that the fork has lost.
        return 2
    except KeyboardInterrupt:
        print("error: interrupted: run it again when you like", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    loaded = stack.load(REPO)
    name = "gpu" if options.gpu else "cpu"
    listed = guards.load(REPO / "tests" / "upstream" / f"{name}.toml")
    gone = guards.missing(listed, loaded.places.tree)
    if gone:
        raise StackError(
            f"tests/upstream/{name}.toml lists {gone[0]}, which is not in vllm/: run "
            "scripts/apply.sh, or take it off the list"
        )
    paths = [guard.path for guard in listed]
    # Tests that share a GPU would run out of its memory.
    runner = Runner(options.gpu, 1 if options.gpu else os.cpu_count() or 1)
    folder = fetch.cache_folder() / "upstream-tests"
    folder.mkdir(parents=True, exist_ok=True)
    cached = folder / f"base-{name}-{key(loaded, paths)[:16]}.json"
    base = None if options.fresh else read(cached)
    from_cache = base is not None
    if base is None:
        base = run_base(loaded, runner, paths, folder)
        cached.write_text(json.dumps(asdict(base)) + "\n")
    if "passed" not in base.counts():
        raise StackError(
            f"no test passes on the base: see {folder / 'base.log'}; the list guards "
            "nothing here"
        )
    log = folder / "fork.log"
    fork = runner.run("fork", loaded.places.tree, paths, log)
    lost = compare(base.outcomes, fork.outcomes)
    if options.json:
        print(json.dumps(_facts(name, base, from_cache, fork, lost, log), indent=1))
    else:
        print("\n".join(_words(listed, base, from_cache, fork, lost, log)))
    return 1 if lost else 0


def key(loaded: Stack, paths: Sequence[str]) -> str:
    """What the base's outcomes depend on: the release, the list, what runs it."""
    base = loaded.base
    packages = sorted(
        f"{it.name} {it.version}"
        for it in importlib.metadata.distributions()
        if it.name != "vllm"
    )
    runs = [(HERE / name).read_text() for name in ("recorder.py", "session.py")]
    wheel = base.wheel(platform.machine()).sha256
    facts = [base.sdist.sha256, wheel, sys.version, *paths, *packages, *runs]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def read(place: Path) -> Session | None:
    """A cached session; None if there is none that can be read."""
    try:
        return Session(**json.loads(place.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def run_base(
    loaded: Stack, runner: Runner, paths: Sequence[str], folder: Path
) -> Session:
    """Run the tests on the release as it is, in a scratch copy."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".base-") as temporary:
        tree = Path(temporary) / "vllm"
        base = loaded.base
        note(f"unpacking vLLM {base.version}")
        source.resolve(None, base, offline=False).lay(tree, base)
        wheel = fetch.fetch(base.wheel(platform.machine()), base.version, offline=False)
        Wheel(wheel).unpack(tree, lambda path: not (tree / path).exists())
        return runner.run("base", tree, paths, folder / "base.log")


def compare(base: Mapping[str, str], fork: Mapping[str, str]) -> dict[str, str]:
    """Tests that pass on the base only -> what they do on the fork."""
    return {
        test: fork.get(test, "did not run")
        for test, outcome in base.items()
        if outcome == "passed" and fork.get(test) != "passed"
    }


def idle(listed: Sequence[guards.Guard], base: Session) -> list[str]:
    """Listed paths of which no test passes on the base: they guard nothing here."""
    passed = [test for test, outcome in base.outcomes.items() if outcome == "passed"]
    return [it.path for it in listed if not any(t.startswith(it.path) for t in passed)]


def _facts(
    name: str,
    base: Session,
    from_cache: bool,
    fork: Session,
    lost: Mapping[str, str],
    log: Path,
) -> dict[str, Any]:
    return {
        "list": name,
        "base": {
            "cached": from_cache, "seconds": round(base.seconds, 1), **base.counts()
        },
        "fork": {"seconds": round(fork.seconds, 1), **fork.counts()},
        "lost": [{"test": test, "fork": how} for test, how in lost.items()],
        "log": str(log),
    }  # fmt: skip


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
    for path in idle(listed, base):
        lines.append(f"idle  {path}: no test of it passes on the base")
    for test, how in lost.items():
        lines.append(f"LOST  {test}: passes on the base, {how} here")
    if lost:
        lines.append(f"{count(len(lost), 'test')} lost: see {log}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
