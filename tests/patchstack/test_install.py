"""The build of the tree, its version, and `doctor`."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import synthetic

TREE = synthetic.REPO / "vllm"
INSTALL = ["-m", "pip", "install", "-q", "--no-index", "--no-deps"]
NO_ISOLATION = "--no-build-isolation"


@pytest.fixture(scope="module")
def _environment(tmp_path_factory):
    """An environment with pip and the tests' setuptools, and nothing else."""
    place = tmp_path_factory.mktemp("environment") / "env"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    # Old Pythons put one of their own there.
    remove = ["-m", "pip", "uninstall", "-q", "-y", "setuptools"]
    subprocess.run([place / "bin" / "python", *remove], check=True)
    site = place / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for name in ("setuptools", "pkg_resources", "_distutils_hack", "packaging"):
        for found in Path(sysconfig.get_paths()["purelib"]).glob(f"{name}*"):
            (site / found.name).symlink_to(found)
    return place / "bin" / "python"


@pytest.fixture
def python(_environment):
    yield _environment
    subprocess.run(
        [_environment, "-m", "pip", "uninstall", "-q", "-y", "vllm"],
        capture_output=True,
        check=False,
    )


def pip(python, checkout, *args):
    return subprocess.run(
        [python, *INSTALL, NO_ISOLATION, *args, "./vllm"],
        cwd=checkout.repo,
        env=checkout.environment(),
        capture_output=True,
        text=True,
    )


def imported(python, cwd):
    script = (
        "import importlib.metadata, json, vllm; print(json.dumps("
        "[vllm.__file__, vllm.__version__, importlib.metadata.version('vllm')]))"
    )
    out = subprocess.check_output([python, "-c", script], cwd=cwd, text=True)
    return json.loads(out)


def test_install_and_import_from_anywhere(stacked, python, tmp_path):
    done = pip(python, stacked, "-e")
    assert done.returncode == 0, done.stderr
    expected = [
        str(stacked.tree / "vllm" / "__init__.py"),
        "9.9.0+ours.1",
        "9.9.0+ours.1",
    ]
    for folder in (stacked.repo, stacked.tree, tmp_path):
        assert imported(python, folder) == expected
    # Installing leaves nothing that counts as an edit.
    assert "nothing to do" in stacked.ok("apply")


@pytest.mark.parametrize("kind", ["detached", "shallow", "archive"])
def test_version_is_the_same_in_any_checkout(stacked, python, tmp_path, kind):
    clone = tmp_path / "clone"
    if kind == "archive":
        clone.mkdir()
        stacked.git("archive", "-o", str(tmp_path / "a.tar"), "HEAD")
        subprocess.run(["tar", "xf", tmp_path / "a.tar", "-C", clone], check=True)
    else:
        depth = ["--depth", "1"] if kind == "shallow" else []
        stacked.git("clone", "-q", *depth, f"file://{stacked.repo}", str(clone))
    other = synthetic.Checkout(clone, stacked.upstream, stacked.cache)
    if kind == "detached":
        other.git("checkout", "-q", "--detach", "HEAD")
    other.ok("apply")
    assert other.content() == stacked.content()
    done = pip(python, other, "-e")
    assert done.returncode == 0, done.stderr
    assert imported(python, clone)[1:] == ["9.9.0+ours.1", "9.9.0+ours.1"]


def test_install_refuses_a_tree_that_is_not_applied(stacked, python):
    stacked.ok("apply", "--unapply")
    done = pip(python, stacked, "-e")
    assert done.returncode == 1
    assert (
        "error: this tree is not applied: run scripts/apply.sh, then pip install -e "
        "vllm" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_install_refuses_a_tree_of_another_stack(stacked, python):
    patch = stacked.patch("step-by-two.patch")
    patch.write_bytes(patch.read_bytes().replace(b"it is", b"was"))
    done = pip(python, stacked, "-e")
    assert done.returncode == 1
    assert (
        "error: this tree was made from another stack: run scripts/apply.sh, then pip "
        "install -e vllm" in done.stderr
    )


def test_only_editable_installs(stacked, python):
    done = pip(python, stacked)
    assert done.returncode == 1
    assert "error: this tree installs in place: pip install -e vllm" in done.stderr


def test_doctor_names_a_marker_that_disagrees(stacked, python):
    pip(python, stacked, "-e")
    place = stacked.tree / ".stack.json"
    marker = json.loads(place.read_text())
    del marker["files"]["vllm/ours.py"]
    place.write_text(json.dumps(marker))
    done = stacked.run("doctor", "--python", str(python), "--json")
    assert (
        f"the marker of {stacked.tree} disagrees with the stack on vllm/ours.py: run "
        "scripts/apply.sh"
    ) in json.loads(done.stdout)["faults"]
    stacked.ok("apply")
    assert "vllm/ours.py" in json.loads(place.read_text())["files"]


def test_own_edits_are_in_the_identity_from_the_next_apply_on(stacked):
    def identity():
        return json.loads(stacked.ok("status", "--json"))["identity"]

    before = identity()
    ours = stacked.tree / "vllm" / "ours.py"
    text = ours.read_text()
    ours.write_text("OURS = 2\n")
    assert identity() == before + "+edited"
    assert "nothing to do" in stacked.ok("apply")
    after = identity()
    assert after.split(".")[0] == before.split(".")[0]
    assert after.split(".")[1] != before.split(".")[1]
    ours.write_text(text)
    stacked.ok("apply")
    assert identity() == before


@pytest.fixture
def diagnose(stacked, python):
    """Runs `doctor`; gives what it found, and what is wrong."""

    def run():
        done = stacked.run("doctor", "--python", str(python), "--json")
        assert "Traceback" not in done.stderr
        found = json.loads(done.stdout)
        assert done.returncode == bool(found["faults"])
        return found["facts"], [
            fault
            for fault in found["faults"]
            # The synthetic engine asks for the real one's packages.
            if not fault.startswith("not installed: ") and "vllm needs" not in fault
        ]

    return run


def test_doctor(stacked, python, diagnose):
    def faults():
        return diagnose()[1]

    assert faults() == [f"vllm is not installed for {python}: pip install -e vllm"]
    pip(python, stacked, "-e")
    assert faults() == []
    assert diagnose()[0]["decode"].startswith("unknown (ModuleNotFoundError: ")
    library = stacked.tree / "vllm" / "_C.abi3.so"
    library.write_bytes(b"another build")
    assert faults() == [
        "vllm/ has local edits (changed binaries: vllm/_C.abi3.so): keep them with "
        "scripts/refresh.sh TOPIC (new files: --own PATH) or drop them with "
        "--discard-edits",
        "vllm/_C.abi3.so differ from the release wheel: scripts/apply.sh "
        "--discard-edits",
    ]
    stacked.ok("apply", "--discard-edits")
    version = stacked.tree / "vllm" / "_version.py"
    version.write_text('__version__ = "9.9.0+ours.2"\n')
    found = faults()
    assert found[0] == (
        "vllm 9.9.0+ours.1 is installed, the tree is 9.9.0+ours.2: pip install -e vllm"
    )
    assert found[1].startswith("edited since apply (vllm/_version.py), so an engine ")
    assert len(found) == 2
    version.write_text("1 / 0\n")
    assert any("import vllm fails (ZeroDivisionError" in fault for fault in faults())


def test_doctor_on_another_vllm_that_comes_first(stacked, python, tmp_path, diagnose):
    pip(python, stacked, "-e")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(stacked.tree / "vllm", elsewhere / "vllm")
    site = next(python.parents[1].glob("lib/*/site-packages"))
    shadow = site / "0-shadow.pth"
    shadow.write_text(f"import sys; sys.path.insert(0, {str(elsewhere)!r})\n")
    try:
        found = diagnose()[1]
    finally:
        shadow.unlink()
    assert found[0] == (
        f"import vllm gives {elsewhere / 'vllm'}, not {stacked.tree / 'vllm'}: pip "
        "uninstall vllm, then pip install -e vllm"
    )
    assert found[1].startswith("modules come from elsewhere than the tree: ")
    assert found[2] == (
        f"{elsewhere} does not say which stack it was made from, so an engine reports "
        "'unknown': run scripts/apply.sh, then pip install -e vllm"
    )
    # It has a marker now, of a stack with another patch, and was edited too.
    marker = json.loads((stacked.tree / ".stack.json").read_text())
    marker |= {"digest": "f" * 64, "identity": "ffffffffffff.000000000000"}
    (elsewhere / ".stack.json").write_text(json.dumps(marker))
    (elsewhere / "vllm" / "engine.py").write_text("EDITED = True\n")
    shadow.write_text(f"import sys; sys.path.insert(0, {str(elsewhere)!r})\n")
    try:
        facts, found = diagnose()
    finally:
        shadow.unlink()
    digest = json.loads(stacked.ok("status", "--json"))["stack"][:12]
    assert found[2:] == [
        f"{elsewhere} was made from vLLM 9.9.0, stack ffffffffffff; this stack is for "
        f"vLLM 9.9.0, {digest}: pip install -e vllm",
        "edited since apply (vllm/engine.py), so an engine reports "
        "ffffffffffff.000000000000+edited: run scripts/apply.sh",
    ]
    assert facts["identity"] == "ffffffffffff.000000000000+edited"


def test_doctor_without_a_python(stacked):
    assert stacked.fails("doctor", "--python", "/nowhere/python") == (
        "cannot run /nowhere/python: No such file or directory: name the interpreter "
        "of the installation: --python PYTHON"
    )


def test_version_is_one_fact():
    scope = {}
    exec((TREE / "vllm" / "_version.py").read_text(), scope)
    version = scope["__version__"]
    assert version == "0.33.0+dsv41.1"
    assert scope["__version_tuple__"] == (0, 33, 0, "dsv41.1")
    # The build reads the literal; no other tracked file of the tree repeats it.
    for name in ("pyproject.toml", "stack_backend.py"):
        assert re.escape(version) not in (TREE / name).read_text()
