"""Upstream's tests on two trees: what is recorded, compared and reported."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from patchstack.errors import StackError
from upstream_tests import __main__ as command
from upstream_tests import guards
from upstream_tests.session import Runner, fold

REPO = Path(__file__).resolve().parents[2]

TESTS = """\
import pytest
import vllm

def test_same():
    pass

@pytest.mark.parametrize("width", [8, 16])
def test_width(width):
    assert width <= vllm.WIDTH

def test_skipped():
    pytest.skip("needs a GPU")

@pytest.mark.xfail
def test_expected_to_fail():
    assert False

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_teardown(broken):
    pass

def test_mark(request):
    assert request.node.get_closest_marker("skip_global_cleanup")
"""


def make_tree(folder, width):
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(f"WIDTH = {width}\n")
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "test_a.py").write_text(TESTS)
    return folder


def run(tree, tmp_path, *paths, workers=1):
    return Runner(gpu=False, workers=workers).run(
        "fork", tree, paths or ["tests/test_a.py"], tmp_path / "log"
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_outcomes(tmp_path, workers):
    session = run(make_tree(tmp_path / "tree", 8), tmp_path, workers=workers)
    assert session.outcomes == {
        "tests/test_a.py::test_same": "passed",
        "tests/test_a.py::test_width[8]": "passed",
        "tests/test_a.py::test_width[16]": "failed",
        "tests/test_a.py::test_skipped": "skipped",
        "tests/test_a.py::test_expected_to_fail": "xfailed",
        "tests/test_a.py::test_teardown": "failed",
        "tests/test_a.py::test_mark": "passed",
    }
    assert session.counts() == {"failed": 2, "passed": 3, "skipped": 1, "xfailed": 1}


def test_a_file_that_cannot_be_imported_fails_alone(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    (tree / "tests" / "test_b.py").write_text("import nothing_of_that_name\n")
    outcomes = run(tree, tmp_path, "tests").outcomes
    assert outcomes["tests/test_b.py"] == "failed"
    assert outcomes["tests/test_a.py::test_same"] == "passed"


def test_another_vllm_than_the_trees_is_refused(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    other = make_tree(tmp_path / "other", 8)
    (tree / "tests" / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(other)!r})\nimport vllm\n"
    )
    with pytest.raises(StackError, match=f"vllm comes from {other}"):
        run(tree, tmp_path)


def test_a_session_that_cannot_run_is_an_error(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    with pytest.raises(StackError, match="file or directory not found: tests/missing"):
        run(tree, tmp_path, "tests/missing.py")


def test_the_worst_phase_counts():
    reports = [
        ("a", "setup", "passed"), ("a", "call", "passed"), ("a", "teardown", "failed"),
        ("b", "setup", "failed"), ("b", "teardown", "passed"),
        ("c", "setup", "skipped"), ("c", "teardown", "passed"),
        ("d", "setup", "passed"),
    ]  # fmt: skip
    assert fold([json.dumps(it) for it in reports]) == {
        "a": "failed", "b": "failed", "c": "skipped",
    }  # fmt: skip


def test_only_what_passes_on_the_base_can_be_lost():
    base = dict.fromkeys("abcd", "passed") | {"e": "failed", "f": "skipped"}
    fork = {"a": "passed", "b": "failed", "c": "skipped", "e": "failed", "f": "failed"}
    assert command.compare(base, fork) == {
        "b": "failed", "c": "skipped", "d": "did not run",
    }  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A base and a fork with a list of one file."""
    repo = tmp_path / "repo"
    (repo / "tests" / "upstream").mkdir(parents=True)
    listed = repo / "tests" / "upstream" / "cpu.toml"
    listed.write_text('"tests/test_a.py" = "it guards"\n')
    fork = make_tree(repo / "vllm", 8)
    base = make_tree(tmp_path / "base", 16)
    loaded = SimpleNamespace(places=SimpleNamespace(tree=fork))
    ran = []

    def run_base(_loaded, runner, paths, folder):
        ran.append(1)
        return runner.run("base", base, paths, folder / "base.log")

    monkeypatch.setattr(command, "REPO", repo)
    monkeypatch.setattr(command.stack, "load", lambda _: loaded)
    monkeypatch.setattr(command, "key", lambda _loaded, paths: "k" * 64)
    monkeypatch.setattr(command, "run_base", run_base)
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)
    monkeypatch.setenv("PATCHSTACK_CACHE", str(tmp_path / "cache"))
    return SimpleNamespace(base=base, fork=fork, listed=listed, ran=ran)


def test_a_lost_test_is_named(project, capsys):
    assert command.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("base  1 failed, 4 passed, 1 skipped, 1 xfailed (")
    assert lines[1].startswith("fork  2 failed, 3 passed, 1 skipped, 1 xfailed (")
    assert lines[2] == (
        "LOST  tests/test_a.py::test_width[16]: passes on the base, failed here"
    )
    assert lines[3].startswith("1 test lost: see ")
    assert "assert 16 <= 8" in Path(lines[3].split("see ")[1]).read_text()


def test_the_base_is_run_once(project, capsys):
    assert command.main(["--json"]) == 1
    first = json.loads(capsys.readouterr().out)
    assert first["lost"] == [
        {"test": "tests/test_a.py::test_width[16]", "fork": "failed"}
    ]
    (project.fork / "vllm" / "__init__.py").write_text("WIDTH = 16\n")
    assert command.main(["--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (first["base"]["cached"], second["base"]["cached"]) == (False, True)
    assert second["lost"] == []
    assert project.ran == [1]
    assert command.main(["--fresh"]) == 0
    assert project.ran == [1, 1]


def test_a_list_that_guards_nothing_is_an_error(project, capsys):
    (project.base / "tests" / "test_a.py").write_text("def test(): assert False\n")
    assert command.main([]) == 2
    assert "no test passes on the base" in capsys.readouterr().err


def test_a_listed_file_that_is_gone_is_an_error(project, capsys):
    project.listed.write_text('"tests/gone.py" = "it guarded"\n')
    assert command.main([]) == 2
    assert capsys.readouterr().err == (
        "error: tests/upstream/cpu.toml lists tests/gone.py, which is not in vllm/: "
        "run scripts/apply.sh, or take it off the list\n"
    )


@pytest.mark.parametrize("text", ['"a" = " "', '"a" = 1', "a b"])
def test_each_entry_needs_a_reason(tmp_path, text):
    (tmp_path / "cpu.toml").write_text(text)
    with pytest.raises(StackError):
        guards.load(tmp_path / "cpu.toml")


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_lists(name):
    listed = guards.load(REPO / "tests" / "upstream" / f"{name}.toml")
    assert guards.missing(listed, REPO / "vllm") == []
    paths = [guard.path for guard in listed]
    assert paths == sorted(paths)
