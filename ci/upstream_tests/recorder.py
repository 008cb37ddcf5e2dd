"""pytest plugin (`-p recorder`): one JSON line a report, written as it comes.

Knows nothing of the rest: it is loaded into upstream's test session, from this
folder.  `RECORDER_OUT` names the file, `RECORDER_TREE` the tree under test.
"""

import json
import os
import sys
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Record the reports of all workers, in the process that collects them."""
    # Under xdist the workers' reports all reach the controller.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(os.environ["RECORDER_OUT"])))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse another package than that of the tree under test."""
    module = sys.modules.get("vllm")
    origin = getattr(module, "__file__", None) or ""
    tree = Path(os.environ["RECORDER_TREE"])
    if module is not None and not Path(origin).is_relative_to(tree):
        raise pytest.UsageError(f"vllm comes from {origin}, not from {tree}")
    for item in items:
        # Upstream's own mark: no garbage collection of seconds after each test.
        item.add_marker("skip_global_cleanup")


class _Recorder:
    def __init__(self, out: Path) -> None:
        self._out = out.open("a", buffering=1, encoding="utf-8")

    def _write(self, test: str, when: str | None, outcome: str) -> None:
        self._out.write(json.dumps([test, when, outcome]) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # So that a test whose process dies is known by its name.
        self._write(nodeid, "start", "unfinished")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        self._write(report.nodeid, report.when, outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A file may skip itself as a whole.
        if not report.passed:
            self._write(report.nodeid, "collect", report.outcome)
