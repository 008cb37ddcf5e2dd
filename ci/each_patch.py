"""Each patch at its place in the stack: its tests pass with it, and not without.

A scratch checkout gets the first patches of the series, one more each time; the
tests are those of the patches' `Tests:` lines.  A patch whose tests pass without
it too is not guarded by them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import cli
from cli import Fault, note
from patchstack import stack
from patchstack.errors import count
from patchstack.progress import step
from patchstack.stack import SERIES, Stack, base
from patchstack.stack.patch import Patch

# What a checkout needs beside its own files, to be applied and tested.
PARTS = ("scripts", "ci", "tests", "patches", base.FILE, "pyproject.toml", ".gitignore")


@dataclass(frozen=True)
class Result:
    """What both checks of a patch have shown."""

    patch: str
    fault: str | None
    log: str
    """What pytest said last, where there is a fault."""


@dataclass(frozen=True)
class Scratch:
    """A checkout whose series is cut."""

    repo: Path

    def copy(self, loaded: Stack) -> None:
        """Fill it with what is applied and tested, the series aside."""
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
        for part in PARTS:
            place = loaded.places.repo / part
            if place.is_dir():
                shutil.copytree(place, self.repo / part, ignore=ignored)
            else:
                shutil.copy2(place, self.repo / part)
        for path in loaded.own:
            target = self.repo / "vllm" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(loaded.places.tree / path, target)

    def apply(self, patches: Sequence[Patch]) -> None:
        """Apply only these; raises `Fault` with what apply said."""
        series = "".join(f"{patch.name}\n" for patch in patches)
        (self.repo / "patches" / SERIES).write_text(series)
        done = subprocess.run(
            [self.repo / "scripts" / "apply.sh"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Fault(done.stderr.strip().splitlines()[-1])

    def test(self, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run tests on the tree as it is."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu"]
        return subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=self.repo,
            env=os.environ | {"PYTHONPATH": str(self.repo / "vllm")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def tests_of(patch: Patch, repo: Path) -> list[str]:
    """The tests that a patch names; raises `Fault` where one has no file."""
    tests = patch.trailers.get("Tests", "").split()
    for test in tests:
        if not (repo / test.partition("::")[0]).exists():
            raise Fault(
                f"patches/{patch.name}: Tests names {test}, which is not there: "
                f"scripts/refresh.sh {patch.topic} --tests TESTS"
            )
    if not tests:
        raise Fault(f"patches/{patch.name} names no tests: give it a Tests: line")
    return tests


def check(loaded: Stack, scratch: Scratch) -> list[Result]:
    """Both checks of every patch, in the order of the series."""
    series = loaded.patches
    tests = [tests_of(patch, loaded.places.repo) for patch in series]
    scratch.copy(loaded)
    results = []
    scratch.apply([])
    for at, patch in enumerate(series):
        started = time.monotonic()
        step(patch.name)
        without = scratch.test(tests[at])
        fault, log = None, ""
        if without.returncode == 0:
            fault, log = "its tests pass without it", without.stdout
        scratch.apply(series[: at + 1])
        done = scratch.test(tests[at])
        if done.returncode:
            fault, log = "its tests fail at its place", done.stdout
        note(f"{patch.name}: {fault or 'holds'} ({time.monotonic() - started:.0f} s)")
        results.append(Result(patch.name, fault, log))
    return results


def parser() -> argparse.ArgumentParser:
    """The command line of `scripts/test.sh patches`."""
    made = argparse.ArgumentParser(
        prog="scripts/test.sh patches",
        description="Apply the series one patch at a time. The tests of each patch's "
        "Tests: line must pass at its place, and not all pass without it.",
    )
    made.add_argument(
        "--json",
        action="store_true",
        help="result as JSON on stdout (docs/schemas/patches.v1.json)",
    )
    return made


def run(options: argparse.Namespace) -> int:
    """Check the series and say which patches are at fault."""
    loaded = stack.load(cli.REPO)
    step("applying the base")
    with tempfile.TemporaryDirectory(prefix="each-patch-") as temporary:
        results = check(loaded, Scratch(Path(temporary)))
    faulty = [result for result in results if result.fault]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return cli.FOUND if faulty else 0
    for result in faulty:
        print("\n".join(result.log.splitlines()[-30:]))
    for result in results:
        print(f"{result.patch}: {result.fault or 'holds'}")
    if faulty:
        return cli.fail(f"{count(len(faulty), 'patch')} at fault", cli.FOUND)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(parser().parse_args, run))
