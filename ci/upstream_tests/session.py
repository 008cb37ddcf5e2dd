"""One run of upstream's tests on one tree."""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli import Fault
from patchstack.progress import Ticker

from . import processes
from .processes import Job
from .trees import Tree

HERE = Path(__file__).parent
MODELS = HERE / "models"
TEST_S = 300
"""Time limit of one test, where its file has none."""

# Set before vllm and triton are imported.  Without the fixed hash seed xdist's
# workers disagree on tests that upstream parametrizes over sets.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
# pytest's exit codes: all passed, some failed, none collected; wrong usage.
_RAN = {0, 1, 5}
_USAGE = 4


@dataclass(frozen=True)
class Session:
    """What the tests of a tree came to."""

    outcomes: Mapping[str, str]
    """Test id -> passed, failed, skipped, xfailed or unfinished."""
    seconds: float
    cut: Mapping[str, str] = field(default_factory=dict)
    """Test file -> how its process ended before its tests did."""

    def counts(self) -> dict[str, int]:
        """How many tests had each outcome."""
        return dict(sorted(Counter(self.outcomes.values()).items()))


@dataclass(frozen=True)
class Runner:
    """How tests are run, on whichever tree.

    On a CPU all are one pytest run of `workers` processes. On a GPU each file is a
    run of its own, `workers` of them at a time, `file_s` seconds at most: an error of
    CUDA spoils what its process does after it, and a kernel may hang.
    """

    gpu: bool
    workers: int
    file_s: float = TEST_S

    def run(self, name: str, tree: Tree, paths: Sequence[str], log: Path) -> Session:
        """Run the tests `paths` of a tree; raises `Fault` if none can."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            jobs = self._jobs(tree, paths, folder)
            ticker = Ticker(name)

            def tick(ended: int) -> None:
                files = f", {ended} of {len(jobs)} files done" if self.gpu else ""
                ticker.tick(f"{len(_read(folder))} tests run{files}")

            limit_s = self.file_s if self.gpu else None
            at_once = self.workers if self.gpu else 1
            try:
                codes = processes.run(jobs, at_once, limit_s, tick)
            finally:
                _join(jobs, log)
            outcomes = _read(folder)
        cut = {it: self._how(code) for it, code in codes.items() if code not in _RAN}
        # One process that dies leaves nothing to compare; neither does one that
        # pytest refuses to run.
        if not outcomes or (cut and not self.gpu) or _USAGE in codes.values():
            lines = log.read_text(errors="replace").strip().splitlines()
            raise Fault(
                f"upstream's tests cannot run on the {name}: {lines[-1]}: see {log}"
            )
        return Session(outcomes, time.monotonic() - started, cut)

    def _how(self, code: int | None) -> str:
        if code is None:
            return f"stopped after {self.file_s:g} s"
        return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"

    def _jobs(self, tree: Tree, paths: Sequence[str], folder: Path) -> list[Job]:
        runs = [[path] for path in _files(tree, paths)] if self.gpu else [list(paths)]
        return [
            Job(
                path[0] if self.gpu else "all",
                self._command(tree, path),
                # The names of models that tests ask for are folders here.
                MODELS,
                self._environment(tree, folder / f"{number}.reports"),
                folder / f"{number}.log",
            )
            for number, path in enumerate(runs)
        ]

    def _command(self, tree: Tree, paths: Sequence[str]) -> list[str]:
        options = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(tree.tests)]
        options += ["-p", "recorder", "-p", "no:cacheprovider", "-q"]
        # Half of a file's time, so that a test that hangs leaves some for the rest.
        timeout = self.file_s / 2 if self.gpu else TEST_S
        options += ["--continue-on-collection-errors", "--timeout", f"{timeout:g}"]
        if self.workers > 1 and not self.gpu:
            options += ["-n", str(self.workers)]
        tests = [str(tree.tests / path) for path in paths]
        return [sys.executable, "-m", "pytest", *options, *tests]

    def _environment(self, tree: Tree, out: Path) -> dict[str, str]:
        env = os.environ | _ENVIRONMENT | ({} if self.gpu else _CPU_ENVIRONMENT)
        folders = [tree.root, tree.tests, HERE, *tree.packages]
        return env | {
            "PYTHONPATH": os.pathsep.join(str(it) for it in dict.fromkeys(folders)),
            "PYTHONDONTWRITEBYTECODE": "" if tree.scratch else "1",
            "PYTHONUNBUFFERED": "1",
            "RECORDER_OUT": str(out),
            "RECORDER_TREE": str(tree.root),
        }


def fold(lines: Sequence[str]) -> dict[str, str]:
    """Reports of the recorder -> one outcome a test; the worst phase counts."""
    outcomes: dict[str, str] = {}
    for line in lines:
        test, when, outcome = json.loads(line)
        known = outcomes.get(test, "unfinished")
        worse = outcome != "passed" and known != "failed"
        if worse or (when == "call" and known == "unfinished"):
            outcomes[test] = outcome
    return outcomes


def _files(tree: Tree, paths: Sequence[str]) -> list[str]:
    """The test files of listed files and folders, the largest first.

    A large one that starts last would be waited for alone.
    """
    found: set[Path] = set()
    for path in paths:
        place = tree.tests / path
        found.update(place.rglob("test_*.py") if place.is_dir() else [place])
    ordered = sorted(found, key=lambda it: (-it.stat().st_size, it))
    return [it.relative_to(tree.tests).as_posix() for it in ordered]


def _read(folder: Path) -> dict[str, str]:
    """The outcomes so far; the last line of a report may be half written."""
    outcomes: dict[str, str] = {}
    for place in sorted(folder.glob("*.reports")):
        outcomes |= fold(place.read_text(encoding="utf-8").split("\n")[:-1])
    return outcomes


def _join(jobs: Sequence[Job], log: Path) -> None:
    """What all jobs said, as one file."""
    with log.open("wb") as out:
        for job in jobs:
            if job.log.exists():
                out.write(f"==== {job.name}\n".encode() + job.log.read_bytes())
