"""One run of upstream's tests on one tree."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchstack.errors import StackError
from patchstack.progress import PERIOD_S, note

HERE = Path(__file__).parent
TIMEOUT_S = 300
"""For one test."""

# Set before vllm and triton are imported.  Without the fixed hash seed xdist's
# workers disagree on tests that upstream parametrizes over sets.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Session:
    outcomes: Mapping[str, str]
    """Test id -> passed, failed, skipped or xfailed."""
    seconds: float

    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(self.outcomes.values()).items()))


@dataclass(frozen=True)
class Runner:
    """How tests are run, on whichever tree."""

    gpu: bool
    workers: int

    def run(self, name: str, tree: Path, paths: Sequence[str], log: Path) -> Session:
        """Run the tests `paths` of a tree; raises `StackError` if none can."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / "reports"
            out.touch()
            with log.open("wb") as said:
                process = subprocess.Popen(
                    self._command(tree, paths),
                    cwd=tree,
                    env=self._environment(tree, out),
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
                try:
                    _wait(process, name, out)
                finally:
                    process.kill()
                    process.wait()
            outcomes = fold(out.read_text(encoding="utf-8").splitlines())
        # 1 is pytest's own code for tests that fail.
        if process.returncode not in (0, 1) or not outcomes:
            lines = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise StackError(
                f"upstream's tests cannot run on the {name}: {lines[-1]}: see {log}"
            )
        return Session(outcomes, time.monotonic() - started)

    def _command(self, tree: Path, paths: Sequence[str]) -> list[str]:
        options = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(tree)]
        options += ["-p", "recorder", "-p", "no:cacheprovider", "-q"]
        options += ["--continue-on-collection-errors", "--timeout", str(TIMEOUT_S)]
        if self.workers > 1:
            options += ["-n", str(self.workers)]
        return [sys.executable, "-m", "pytest", *options, *paths]

    def _environment(self, tree: Path, out: Path) -> dict[str, str]:
        env = os.environ | _ENVIRONMENT | ({} if self.gpu else _CPU_ENVIRONMENT)
        return env | {
            "PYTHONPATH": os.pathsep.join([str(tree), str(HERE)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "RECORDER_OUT": str(out),
            "RECORDER_TREE": str(tree),
        }


def fold(lines: Sequence[str]) -> dict[str, str]:
    """Reports of the recorder -> one outcome a test; the worst phase counts."""
    outcomes: dict[str, str] = {}
    for line in lines:
        test, when, outcome = json.loads(line)
        if outcome != "passed" and outcomes.get(test) != "failed":
            outcomes[test] = outcome
        elif when == "call":
            outcomes.setdefault(test, outcome)
    return outcomes


def _wait(process: subprocess.Popen[bytes], name: str, out: Path) -> None:
    while True:
        try:
            process.wait(PERIOD_S)
            return
        except subprocess.TimeoutExpired:
            # The last line may be half written.
            lines = out.read_text(encoding="utf-8").split("\n")[:-1]
            tests = len(fold(lines))
            note(f"{name}: {tests} tests run" if tests else f"{name}: collecting tests")
