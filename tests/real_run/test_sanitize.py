"""ci/sanitize.sh: what it calls a clean run, and its one line where it cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZE = Path(__file__).resolve().parents[2] / "ci" / "sanitize.sh"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CLEAN = "3 passed, 8 deselected, 2 warnings in 4.20s\n== ERROR SUMMARY: 0 errors\n"


@pytest.fixture
def cuda(tmp_path) -> Path:
    """A CUDA toolkit whose compute-sanitizer does as the files beside it say.

    It prints ``output`` and exits with ``rc``.
    """
    home = tmp_path / "a toolkit"
    tool = home / "bin/compute-sanitizer"
    tool.parent.mkdir(parents=True)
    tool.write_text(
        '#!/bin/sh\necho "$@"\ncat "${0%/*}/output"\nexit $(cat "${0%/*}/rc")'
    )
    tool.chmod(0o755)
    return home


def sanitize(*arguments, cuda_home: Path, output: str = CLEAN, rc: int = 0, **env):
    if (cuda_home / "bin").exists():
        (cuda_home / "bin/output").write_text(output)
        (cuda_home / "bin/rc").write_text(str(rc))
    return subprocess.run(
        [str(SANITIZE), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={
            # Without a toolkit that this machine may have.
            "PATH": os.defpath,
            "PYTHON": sys.executable,
            "CUDA_HOME": str(cuda_home),
            **env,
        },
    )


def test_every_tool_runs_and_leaves_its_log(cuda, tmp_path):
    done = sanitize(tmp_path / "the logs", cuda_home=cuda)
    assert (done.returncode, done.stdout.count("no errors")) == (0, 4)
    for tool in TOOLS:
        log = (tmp_path / "the logs" / f"{tool}.log").read_text()
        assert log.startswith(f"--tool {tool} ")
        assert "tests/gpu/test_decode_metadata_kernels.py" in log


def test_one_tool(cuda, tmp_path):
    assert sanitize(tmp_path / "logs", "initcheck", cuda_home=cuda).returncode == 0
    assert [log.name for log in (tmp_path / "logs").iterdir()] == ["initcheck.log"]


@pytest.mark.parametrize(
    ("output", "rc"),
    [
        pytest.param(CLEAN, 1, id="the tool fails"),
        pytest.param(CLEAN.replace(": 0", ": 10"), 0, id="errors"),
        pytest.param(CLEAN.replace("ERROR SUMMARY", ""), 0, id="no GPU was seen"),
        pytest.param(CLEAN.replace("passed", "skipped"), 0, id="tests were skipped"),
        pytest.param(
            CLEAN.replace("3 passed", "2 passed, 1 skipped"), 0, id="a test was skipped"
        ),
    ],
)
def test_what_is_no_clean_run(cuda, tmp_path, output, rc):
    logs = tmp_path / "logs"
    done = sanitize(logs, "memcheck", cuda_home=cuda, output=output, rc=rc)
    assert done.returncode == 1
    assert f"memcheck: FAILED, see {logs}/memcheck.log" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((), {}, "say which folder"),
        (("{logs}", "leakcheck"), {}, "no tool 'leakcheck': one of memcheck"),
        (("{logs}",), {"PYTHON": "no-python"}, "set PYTHON"),
    ],
)
def test_one_line_where_it_cannot_run(cuda, tmp_path, arguments, environment, message):
    logs = tmp_path / "logs"
    arguments = [argument.format(logs=logs) for argument in arguments]
    done = sanitize(*arguments, cuda_home=cuda, **environment)
    assert done.returncode == 2
    assert not logs.exists()
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.skipif(
    any(Path("/usr/local/cuda").glob("*/compute-sanitizer")),
    reason="this machine has one",
)
def test_no_compute_sanitizer(tmp_path):
    done = sanitize(tmp_path / "logs", cuda_home=tmp_path / "none")
    assert done.returncode == 2
    assert not (tmp_path / "logs").exists()
    assert done.stderr == (
        "error: compute-sanitizer not found: "
        "install the CUDA toolkit, or set CUDA_HOME\n"
    )


def test_help(tmp_path):
    done = sanitize("--help", cuda_home=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ci/sanitize.sh")
