"""Upstream's tests on two trees: what is recorded, compared and reported."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import cli
import pytest
import schemas
from cli import Fault
from patchstack.files import blob_id
from patchstack.stack.base import Pin
from upstream_tests import __main__ as command
from upstream_tests import guards, processes, trees
from upstream_tests.processes import Job
from upstream_tests.session import Runner, Session, fold
from upstream_tests.trees import Tree

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
        "fork", Tree(tree, tree), paths or ["tests/test_a.py"], tmp_path / "log"
    )


def run_files(tree, tmp_path, *paths, file_s=60.0):
    return Runner(gpu=True, workers=2, file_s=file_s).run(
        "fork", Tree(tree, tree), paths, tmp_path / "log"
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
    with pytest.raises(Fault, match=f"vllm comes from {other}"):
        run(tree, tmp_path)


def test_a_session_that_cannot_run_is_an_error(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    with pytest.raises(Fault, match=r"file or directory not found: .*tests/missing"):
        run(tree, tmp_path, "tests/missing.py")


def test_a_file_that_dies_takes_no_other_with_it(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    (tree / "tests" / "test_b.py").write_text(
        "import os\n\ndef test_before(): pass\n\n"
        "def test_dies(): os.kill(os.getpid(), 9)\n\ndef test_after(): pass\n"
    )
    session = run_files(tree, tmp_path, "tests")
    assert session.cut == {"tests/test_b.py": "ended by signal 9"}
    outcomes = session.outcomes
    assert outcomes["tests/test_b.py::test_before"] == "passed"
    assert outcomes["tests/test_b.py::test_dies"] == "unfinished"
    assert "tests/test_b.py::test_after" not in outcomes
    assert outcomes["tests/test_a.py::test_same"] == "passed"


def test_a_file_that_hangs_is_stopped_with_its_children(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    child = tmp_path / "child"
    (tree / "tests" / "test_b.py").write_text(
        "import subprocess, pathlib, signal, time\n\n"
        "def test_hangs():\n"
        # As a kernel that never ends: no alarm of pytest's gets through.
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "    time.sleep(600)\n"
    )
    session = run_files(tree, tmp_path, "tests/test_b.py", file_s=6)
    assert session.cut == {"tests/test_b.py": "stopped after 6 s"}
    assert session.outcomes == {"tests/test_b.py::test_hangs": "unfinished"}
    assert 6 <= session.seconds < 20
    log = (tmp_path / "log").read_text()
    assert log.startswith("==== tests/test_b.py\n")
    assert "in test_hangs" in log
    with pytest.raises(ProcessLookupError):
        wait_for_end(int(child.read_text()))


def wait_for_end(pid):
    """Raises ProcessLookupError once there is no such process, or only its remains."""
    for _ in range(50):
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError
        time.sleep(0.1)


def test_a_file_that_skips_itself(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    (tree / "tests" / "test_b.py").write_text(
        "import pytest\npytest.skip('no', allow_module_level=True)\n"
    )
    session = run_files(tree, tmp_path, "tests/test_b.py")
    assert session.outcomes == {"tests/test_b.py": "skipped"}
    assert session.cut == {}


def test_another_vllm_is_refused_file_by_file_too(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    other = make_tree(tmp_path / "other", 8)
    (tree / "tests" / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(other)!r})\nimport vllm\n"
    )
    with pytest.raises(Fault, match=f"vllm comes from {other}"):
        run_files(tree, tmp_path, "tests")


def test_models_are_found_by_name(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    (tree / "tests" / "test_b.py").write_text(
        "import json, pathlib\n\ndef test():\n"
        "    place = pathlib.Path('Qwen/Qwen3-0.6B/config.json')\n"
        "    assert json.loads(place.read_text())['model_type'] == 'qwen3'\n"
    )
    session = run(tree, tmp_path, "tests/test_b.py")
    assert session.outcomes == {"tests/test_b.py::test": "passed"}


def test_processes_run_side_by_side_and_are_ended_when_one_stops_us(tmp_path):
    def job(name, code):
        return Job(
            name, [sys.executable, "-c", code], tmp_path, {}, tmp_path / f"{name}.log"
        )

    quick = [job(str(number), f"raise SystemExit({number})") for number in range(3)]
    assert processes.run(quick, 2, None, lambda ended: None) == {"0": 0, "1": 1, "2": 2}

    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); "

    def interrupt(ended):
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.run([job("slow", code + "time.sleep(60)")], 1, None, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGCONT)


def test_the_worst_phase_counts():
    reports = [
        ("a", "setup", "passed"), ("a", "call", "passed"), ("a", "teardown", "failed"),
        ("b", "setup", "failed"), ("b", "teardown", "passed"),
        ("c", "setup", "skipped"), ("c", "teardown", "passed"),
        ("d", "setup", "passed"),
        ("e", "start", "unfinished"), ("e", "setup", "passed"), ("e", "call", "passed"),
        ("f", "start", "unfinished"), ("f", "setup", "passed"),
    ]  # fmt: skip
    assert fold([json.dumps(it) for it in reports]) == {
        "a": "failed", "b": "failed", "c": "skipped", "e": "passed", "f": "unfinished",
    }  # fmt: skip


def test_only_what_passes_on_the_base_can_be_lost():
    base = dict.fromkeys("abcd", "passed") | {"e": "failed", "f": "skipped"}
    fork = {"a": "passed", "b": "failed", "c": "skipped", "e": "failed", "f": "failed"}
    assert command.compare(Session(base, 1), Session(fork, 1)) == {
        "b": "failed", "c": "skipped", "d": "did not run",
    }  # fmt: skip


def test_what_both_were_stopped_before_is_no_loss():
    base = Session({"x::a": "passed", "x::b": "passed"}, 1, {"x": "stopped"})
    short = {"x::a": "passed"}
    assert command.compare(base, Session(short, 1, {"x": "stopped"})) == {}
    lost = {"x::b": "did not run"}
    assert command.compare(base, Session(short, 1)) == lost
    whole = Session(base.outcomes, 1)
    assert command.compare(whole, Session(short, 1, {"x": "stopped"})) == lost
    failed = Session({**short, "x::b": "failed"}, 1, {"x": "stopped"})
    assert command.compare(base, failed) == {"x::b": "failed"}


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """A bundle as unbundle.sh leaves it, and the stack that it was packed from."""
    repo, bundle = tmp_path / "repo", tmp_path / "bundle"
    ours = {
        "vllm/__init__.py": "WIDTH = 8\n",
        "vllm/own.py": "ours",
        "vllm/other.py": "same",
        "vllm/_C.so": "compiled",
    }
    original = "WIDTH = 16\n"
    for place, text in {
        **{bundle / "fork" / path: text for path, text in ours.items()},
        repo / "vllm/vllm/own.py": "ours",
        bundle / "fork/vllm/__pycache__/__init__.pyc": "stale",
        bundle / "base/vllm/__init__.py": original,
        bundle / "upstream/tests/__init__.py": "",
        bundle / "upstream/tests/test_a.py": TESTS,
        bundle / "site/elsewhere.py": "",
    }.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    marker = SimpleNamespace(digest="d", identity="d.c", files={})
    monkeypatch.setattr(trees, "read_marker", lambda root: marker)
    loaded = SimpleNamespace(
        places=SimpleNamespace(tree=repo / "vllm"),
        digest="d",
        own=[".gitignore", "vllm/own.py"],
        originals={"vllm/__init__.py": blob_id(bundle / "base/vllm/__init__.py")},
        base=SimpleNamespace(replaces=[Pin("pyproject.toml", "", "")]),
    )
    return SimpleNamespace(bundle=bundle, loaded=loaded, marker=marker, repo=repo)


def test_the_base_of_a_bundle_is_the_release(unpacked, tmp_path):
    with trees.base(unpacked.loaded, unpacked.bundle, tmp_path) as tree:
        files = {
            it.relative_to(tree.root).as_posix(): it.read_text()
            for it in tree.root.rglob("*")
            if it.is_file()
        }
        assert files == {
            "vllm/__init__.py": "WIDTH = 16\n",
            "vllm/other.py": "same",
            "vllm/_C.so": "compiled",
        }
        # Compiled modules are large: they are there once.
        compiled = unpacked.bundle / "fork/vllm/_C.so"
        assert (tree.root / "vllm/_C.so").samefile(compiled)
        # Packages of the bundle are found, and the tests are the same ones.
        assert tree.tests == unpacked.bundle / "upstream"
        runner = Runner(gpu=True, workers=1)
        base = runner.run("base", tree, ["tests"], tmp_path / "base.log")
    assert not tree.root.exists()
    fork_tree = trees.fork(unpacked.loaded, unpacked.bundle)
    fork = runner.run("fork", fork_tree, ["tests"], tmp_path / "fork.log")
    assert command.compare(base, fork) == {"tests/test_a.py::test_width[16]": "failed"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda it: setattr(it.marker, "digest", "of another stack"),
        lambda it: (it.bundle / "fork/vllm/own.py").write_text("edited"),
        lambda it: (it.repo / "vllm/vllm/own.py").write_text("edited"),
        lambda it: (it.bundle / "fork/vllm/own.py").unlink(),
    ],
)
def test_a_bundle_of_another_stack_is_refused(unpacked, spoil):
    spoil(unpacked)
    with pytest.raises(Fault, match="is not of this stack: pack it again"):
        trees.fork(unpacked.loaded, unpacked.bundle)


@pytest.mark.parametrize("text", [None, "WIDTH = 8\n"])
def test_a_base_that_is_not_upstreams_is_refused(unpacked, tmp_path, text):
    original = unpacked.bundle / "base/vllm/__init__.py"
    original.unlink()
    if text:
        original.write_text(text)
    with (
        pytest.raises(Fault, match="is not upstream's file"),
        trees.base(unpacked.loaded, unpacked.bundle, tmp_path),
    ):
        pass


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

    @contextmanager
    def base_tree(_loaded, _bundle, _folder):
        ran.append(1)
        yield Tree(base, base)

    monkeypatch.setattr(cli, "REPO", repo)
    monkeypatch.setattr(command.stack, "load", lambda _: loaded)
    monkeypatch.setattr(command, "key", lambda _loaded, _runner, _paths: "k" * 64)
    monkeypatch.setattr(command.trees, "base", base_tree)
    monkeypatch.delenv("VLLM_BUNDLE", raising=False)
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)
    monkeypatch.setenv("PATCHSTACK_CACHE", str(tmp_path / "cache"))
    return SimpleNamespace(base=base, fork=fork, listed=listed, ran=ran)


def invoke(*arguments):
    return cli.run(command.parser().parse_args, command.run, arguments)


def test_a_lost_test_is_named(project, capsys):
    assert invoke() == cli.FOUND
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("base  1 failed, 4 passed, 1 skipped, 1 xfailed (")
    assert lines[1].startswith("fork  2 failed, 3 passed, 1 skipped, 1 xfailed (")
    assert lines[2] == (
        "LOST  tests/test_a.py::test_width[16]: passes on the base, failed here"
    )
    assert lines[3].startswith("1 test lost: see ")
    assert "assert 16 <= 8" in Path(lines[3].split("see ")[1]).read_text()


def test_the_base_is_run_once(project, capsys):
    assert invoke("--json") == cli.FOUND
    first = schemas.conforming("upstream.v1", json.loads(capsys.readouterr().out))
    assert first["lost"] == [
        {"test": "tests/test_a.py::test_width[16]", "fork": "failed"}
    ]
    (project.fork / "vllm" / "__init__.py").write_text("WIDTH = 16\n")
    assert invoke("--json") == 0
    second = schemas.conforming("upstream.v1", json.loads(capsys.readouterr().out))
    assert (first["base"]["cached"], second["base"]["cached"]) == (False, True)
    assert second["lost"] == []
    assert project.ran == [1]
    assert invoke("--fresh") == 0
    assert project.ran == [1, 1]


def test_results_can_be_kept(project, tmp_path, capsys):
    out = tmp_path / "results" / "today"
    assert invoke("--out", str(out), "--json") == cli.FOUND
    said = json.loads(capsys.readouterr().out)
    assert json.loads((out / "result.json").read_text()) == said
    assert said["stack"] == "unknown"
    assert said["machine"]["python"].startswith("3.")
    assert {it.name for it in out.iterdir()} == {
        "base.json", "base.log", "fork.json", "fork.log", "result.json",
    }  # fmt: skip
    fork = json.loads((out / "fork.json").read_text())
    assert fork["outcomes"]["tests/test_a.py::test_width[16]"] == "failed"
    # The outcomes of a cached base are kept as well.
    invoke("--out", str(tmp_path / "more"))
    assert (tmp_path / "more/base.json").read_text() == (out / "base.json").read_text()


def test_a_stop_from_outside_ends_the_tests_and_keeps_the_log(tmp_path):
    tree = make_tree(tmp_path / "tree", 8)
    pid = tmp_path / "pid"
    (tree / "tests" / "test_b.py").write_text(
        "import os, pathlib, time\n\ndef test_slow():\n"
        f"    pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    # The command as it is run, with a checkout and a base of ours.
    code = (
        "import runpy, sys\nfrom contextlib import nullcontext\n"
        "from pathlib import Path\nfrom types import SimpleNamespace\n"
        "from patchstack import stack\nfrom upstream_tests import guards, trees\n"
        f"tree = trees.Tree(Path({str(tree)!r}), Path({str(tree)!r}))\n"
        "trees.fork = lambda loaded, bundle: tree\n"
        "trees.bundle = lambda: None\n"
        "trees.base = lambda *_: nullcontext(tree)\n"
        "guards.load = lambda place: [guards.Guard('tests/test_b.py', 'slow')]\n"
        f"sys.argv[1:] = ['--gpu', '--out', {str(tmp_path / 'out')!r}, '--fresh']\n"
        "pin = SimpleNamespace(sha256='')\n"
        "base = SimpleNamespace(wheel=lambda machine: pin, sdist=pin)\n"
        "stack.load = lambda repo: SimpleNamespace(base=base)\n"
        "runpy.run_module('upstream_tests', run_name='__main__')\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": f"{REPO / 'ci'}:{REPO / 'scripts'}",
        "PATCHSTACK_CACHE": str(tmp_path / "cache"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True
    )
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    said = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode == 128 + signal.SIGTERM
    assert said[-1] == "error: stopped: run it again when you like"
    assert (tmp_path / "out/base.log").read_text().startswith("==== tests/test_b.py")
    with pytest.raises(ProcessLookupError):
        wait_for_end(int(pid.read_text()))


@pytest.mark.parametrize("option", ["--workers", "--file-seconds"])
def test_a_number_that_makes_no_sense(project, capsys, option):
    assert invoke(option, "-1") == cli.FAILED
    assert "give more than 0" in capsys.readouterr().err


def test_a_list_that_guards_nothing_is_an_error(project, capsys):
    (project.base / "tests" / "test_a.py").write_text("def test(): assert False\n")
    assert invoke() == cli.FAILED
    assert "no test passes on the base" in capsys.readouterr().err


def test_a_listed_file_that_is_gone_is_an_error(project, capsys):
    project.listed.write_text('"tests/gone.py" = "it guarded"\n')
    assert invoke() == cli.FAILED
    assert capsys.readouterr().err == (
        "error: tests/upstream/cpu.toml lists tests/gone.py, which is not in vllm/: "
        "run scripts/apply.sh, or take it off the list\n"
    )


@pytest.mark.parametrize("text", ['"a" = " "', '"a" = 1', "a b"])
def test_each_entry_needs_a_reason(tmp_path, text):
    (tmp_path / "cpu.toml").write_text(text)
    with pytest.raises(Fault):
        guards.load(tmp_path / "cpu.toml")


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_lists(name):
    listed = guards.load(REPO / "tests" / "upstream" / f"{name}.toml")
    assert guards.missing(listed, REPO / "vllm") == []
    paths = [guard.path for guard in listed]
    assert paths == sorted(paths)
