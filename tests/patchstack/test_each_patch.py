"""`ci/each_patch.py`: the tests of each patch pass at its place, and not without."""

import json
import shutil
import subprocess
import sys

import pytest
import schemas
import synthetic

STEP = "tests/test_engine.py::test_step"
WIDTH = "tests/test_engine.py::test_width"
TESTS = """\
from vllm import engine, layers

def test_step():
    assert engine.start(1) == 3

def test_width():
    assert layers.layers() == 16

def test_nothing():
    assert layers
"""


@pytest.fixture
def guarded(stacked):
    """A checkout whose two patches name a test each."""
    (stacked.repo / "ci").mkdir()
    for name in ("each_patch.py", "cli.py"):
        shutil.copy2(synthetic.REPO / "ci" / name, stacked.repo / "ci")
    (stacked.repo / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (stacked.repo / "tests").mkdir()
    (stacked.repo / "tests" / "test_engine.py").write_text(TESTS)
    name_tests(stacked, STEP, WIDTH)
    return stacked


def name_tests(checkout, step, width):
    checkout.ok("refresh", "step-by-two", "--tests", step)
    checkout.ok("refresh", "wide-layers", "--tests", width)


def each_patch(checkout, *args):
    command = [sys.executable, checkout.repo / "ci" / "each_patch.py", *args]
    return subprocess.run(
        command, env=checkout.environment(), capture_output=True, text=True
    )


def test_a_guarded_stack_holds(guarded):
    before = guarded.snapshot()
    done = each_patch(guarded)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "step-by-two.patch: holds",
        "wide-layers.patch: holds",
    ]
    assert guarded.snapshot() == before


def test_a_test_that_needs_a_later_patch_fails_at_its_place(guarded):
    name_tests(guarded, f"{STEP} {WIDTH}", WIDTH)
    done = each_patch(guarded, "--json")
    assert done.returncode == 1
    first, second = schemas.conforming("patches.v1", json.loads(done.stdout))
    assert first["fault"] == "its tests fail at its place"
    assert "test_width" in first["log"]
    assert second["fault"] is None


def test_a_test_that_passes_without_the_patch_guards_nothing(guarded):
    name_tests(guarded, STEP, "tests/test_engine.py::test_nothing")
    done = each_patch(guarded)
    assert done.returncode == 1
    assert "wide-layers.patch: its tests pass without it" in done.stdout
    assert done.stderr.splitlines()[-1] == "error: 1 patch at fault"


def test_a_test_that_is_gone_is_an_error(guarded):
    name_tests(guarded, STEP, "tests/gone.py")
    done = each_patch(guarded)
    assert done.returncode == 2
    assert done.stderr == (
        "error: patches/wide-layers.patch: Tests names tests/gone.py, which is "
        "not there: scripts/refresh.sh wide-layers --tests TESTS\n"
    )
