"""Processes side by side, each with a time limit. Knows nothing of tests."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.1
_DUMP_S = 5.0


@dataclass(frozen=True)
class Job:
    """A process to be run."""

    name: str
    command: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    log: Path
    """Takes stdout and stderr."""


class _Running:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.started = time.monotonic()
        with job.log.open("wb") as said:
            # A group of its own, so that its children end with it.
            self.process = subprocess.Popen(
                job.command,
                cwd=job.cwd,
                env=job.env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def late(self, limit_s: float | None) -> bool:
        return limit_s is not None and time.monotonic() - self.started > limit_s

    def dump(self) -> None:
        """Let Python write down where it hangs, which an abort makes it do."""
        self.process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_DUMP_S)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(
    jobs: Sequence[Job],
    at_once: int,
    limit_s: float | None,
    tick: Callable[[int], None],
) -> dict[str, int | None]:
    """Run `jobs` in order, `at_once` of them side by side.

    Returns each job's exit code (negative: the signal that ended it), None for one
    that was stopped after `limit_s` seconds. `tick` is called all the while with the
    number of jobs that have ended.
    """
    ended: dict[str, int | None] = {}
    waiting = list(jobs)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Running(waiting.pop(0)))
            time.sleep(_POLL_S)
            for it in list(running):
                code = it.process.poll()
                if code is None and not it.late(limit_s):
                    continue
                if code is None:
                    it.dump()
                ended[it.job.name] = code
                it.end()
                running.remove(it)
            tick(len(ended))
    finally:
        for it in running:
            it.end()
    return ended
