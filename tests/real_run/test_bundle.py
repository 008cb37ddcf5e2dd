"""bundle.sh and unbundle.sh: pack, lose, damage, repeat."""

import hashlib
import io
import json
import os
import platform
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import bundle.__main__ as command
import cli
import distribution
import pytest
import schemas
from bundle import packages, patterns
from cli import Fault

ROOT = Path(__file__).resolve().parents[2]
UNBUNDLE = ROOT / "scripts" / "unbundle.sh"
HERE = ".".join(platform.python_version_tuple()[:2])

FAKE_UV = """#!/bin/sh
# `uv pip compile` and `uv pip install`, without a network.
for requirements; do :; done
case $2 in
compile)
    while [ "$1" != -o ]; do shift; done
    printf 'have-it==1\\nlack-it==2.0 ; python_version > "3"\\n' > "$2"
    if grep -q test-it "$requirements"; then echo test-it==2.1 >> "$2"; fi ;;
install)
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/bin"
    echo '#!/elsewhere' > "$2/bin/tool"
    tr - _ < "$requirements" | while IFS== read -r name rest; do
        mkdir "$2/$name"
        echo "VALUE = ${rest#=}" > "$2/$name/__init__.py"
    done ;;
esac
"""


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_sdist(path: Path) -> str:
    """Upstream's source archive; returns its sha256."""
    names = ("vllm/ours.py", "vllm/patched.py", "vllm/other.py", "tests/test_a.py")
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(f"vllm-1/{name}")
            text = f"upstream's {name}".encode()
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return hashlib.sha256(path.read_bytes()).hexdigest()


PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: Ada <ada@example.org>
Date: Sun, 29 Nov 2026 18:00:00 +0000
Subject: [PATCH] Edit a file

diff --git a/vllm/patched.py b/vllm/patched.py
index 1111..2222 100644
--- a/vllm/patched.py
+++ b/vllm/patched.py
@@ -1 +1 @@
-upstream's
+ours
"""


@pytest.fixture
def stack(tmp_path, monkeypatch) -> Path:
    """A small repository with an applied tree, and a network-less uv."""
    root = tmp_path / "a repo"
    pyproject = (
        '[project]\nname = "vllm"\ndynamic = ["version"]\n'
        'dependencies = ["have-it", "lack-it>=2"]\n'
        '[project.scripts]\nvllm = "vllm.main:main"\n'
        '[project.entry-points."vllm.plugins"]\none = "vllm.plugin:register"\n'
    )
    sdist = write_sdist(tmp_path / "vllm-1.tar.gz")
    write_files(
        root,
        {
            "upstream.toml": '[base]\nversion = "1"\nwheels = {}\n'
            f'sdist = {{ file = "vllm-1.tar.gz", sha256 = "{sdist}" }}\n'
            '[[replaces]]\npath = "pyproject.toml"\nsha256 = ""\nwhy = ""\n'
            '[[replaces]]\npath = "vllm/ours.py"\nsha256 = ""\nwhy = ""\n',
            "vllm/.gitignore": "!/.gitignore\n",
            "patches/series": "edit.patch\n",
            "patches/edit.patch": PATCH,
            "scripts/unbundle.sh": UNBUNDLE.read_text(),
            "vllm/pyproject.toml": pyproject,
            "vllm/.stack.json": '{"digest": "abc"}',
            "vllm/vllm/__init__.py": "",
            "vllm/vllm/_version.py": '__version__ = "1.0+x.2"\n',
            "vllm/vllm/ours.py": "WHO = 'us'\n",
            "vllm/vllm/__pycache__/ours.pyc": "compiled",
            "vllm/vllm/vllm_flash_attn/__init__.py": "the real one",
            "vllm/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "flash",
            "vllm/vllm/_C.abi3.so": "".join(
                map(chr, random.Random(0).choices(range(32, 127), k=20_000))
            ),
            "have.txt": "# the machine\nhave-it 1\nother\n",
        },
    )
    lists = tmp_path / "lists"
    real = ROOT / "ci" / "bundle"
    write_files(
        lists,
        {name: (real / name).read_text() for name in ("skip.txt", "trim.txt")}
        | {"test_packages.txt": "have-it\ntest-it # needed\n"},
    )
    (lists / "standin").symlink_to(real / "standin")
    uv = tmp_path / "bin" / "uv"
    write_files(tmp_path, {"bin/uv": FAKE_UV})
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(cli, "REPO", root)
    # Applying is the patch-stack tool's business, and tested there.
    marker = SimpleNamespace(digest="abc")
    monkeypatch.setattr(distribution, "require_applied", lambda loaded: marker)
    monkeypatch.setattr(command, "HERE", lists)
    return root


def bundle(stack: Path, *more: str, python: str = HERE) -> int:
    return cli.run(
        command.parser().parse_args,
        command.run,
        [
            *("--have", str(stack / "have.txt"), "--out", str(stack / "out")),
            *("--python-version", python),
            *("--sdist", str(stack.parent / "vllm-1.tar.gz"), *more),
        ],
    )


def unbundle(stack: Path, *more: str):
    prefix = stack / "a prefix"
    return subprocess.run(
        [str(UNBUNDLE), "--parts", str(stack / "out"), "--prefix", str(prefix), *more],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )


def manifest(stack: Path, archive: str) -> dict:
    found = next(stack.glob(f"out/part*/{archive}.bundle.json"))
    return schemas.conforming("bundle.v1", json.loads(found.read_text()))


def tree_of(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and ".bundle" not in p.parts
    }


def test_a_tree_that_is_not_as_applied_is_not_packed(stack, monkeypatch, capsys):
    def refuse(loaded):
        raise Fault("nothing is packed: run scripts/apply.sh")

    monkeypatch.setattr(distribution, "require_applied", refuse)
    assert bundle(stack) == cli.FAILED
    assert capsys.readouterr().err == "error: nothing is packed: run scripts/apply.sh\n"
    assert not (stack / "out").exists()


def test_round_trip(stack):
    assert bundle(stack, "--split", "3") == 0
    parts = manifest(stack, "packages")["parts"]
    assert [part["folder"] for part in parts] == ["part1", "part2", "part3"]
    assert manifest(stack, "upstream")["parts"][0]["folder"] == "part4"
    assert manifest(stack, "upstream")["packages"] == ["test-it==2.1"]
    assert manifest(stack, "packages")["packages"] == ["lack-it==2.0"]
    assert manifest(stack, "fork")["stack"] == "abc"
    assert manifest(stack, "fork")["parts"][0]["folder"] == "part5"
    assert (stack / "out" / ".gitignore").read_text() == "*\n"

    done = unbundle(stack)
    assert done.returncode == 0, done.stderr
    got = tree_of(stack / "a prefix")
    assert got["fork/vllm/ours.py"] == b"WHO = 'us'\n"
    assert got["base/vllm/ours.py"] == b"upstream's vllm/ours.py"
    assert got["base/vllm/patched.py"] == b"upstream's vllm/patched.py"
    assert got["upstream/tests/test_a.py"] == b"upstream's tests/test_a.py"
    assert got["upstream/test_it/__init__.py"] == b"VALUE = 2.1\n"
    assert got["site/lack_it/__init__.py"] == b"VALUE = 2.0\n"
    assert not [name for name in got if "upstream/lack_it" in name]
    assert got["fork/vllm/_C.abi3.so"] == (stack / "vllm/vllm/_C.abi3.so").read_bytes()
    assert "base/vllm/other.py" not in got
    assert not [name for name in got if "__pycache__" in name or "/bin/" in name]


def test_the_environment_makes_it_the_one_imported(stack):
    bundle(stack)
    script = (
        f"{unbundle(stack).stdout}\n"
        f"{sys.executable} -c 'import importlib.metadata as m, lack_it, vllm.ours;"
        'points = m.entry_points(group="vllm.plugins");'
        'print(vllm.ours.WHO, lack_it.VALUE, m.version("vllm"), *points.names)\''
    )
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True)
    assert done.stdout == "us 2.0 1.0+x.2 one\n", done.stderr


def test_the_stand_in_takes_imports_and_refuses_calls(stack):
    bundle(stack)
    script = (
        f"{unbundle(stack).stdout}\n{sys.executable} -c '"
        "from vllm.vllm_flash_attn import flash_attn_interface as flash\n"
        "assert not flash.is_fa_version_supported(3)\n"
        "flash.flash_attn_varlen_func()'"
    )
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: this bundle carries no flash-attention kernels: pack it again "
        "with bundle.sh --flash-attention"
    )


def test_flash_attention_can_be_carried(stack):
    bundle(stack, "--flash-attention")
    unbundle(stack)
    got = tree_of(stack / "a prefix")
    assert got["fork/vllm/vllm_flash_attn/__init__.py"] == b"the real one"
    assert "fork/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so" in got


def test_the_same_again_is_kept(stack, capsys):
    bundle(stack)
    before = {p: p.stat().st_mtime_ns for p in stack.glob("out/part*/*.tar.xz.*")}
    assert bundle(stack) == 0
    assert "packages: unchanged" in capsys.readouterr().err
    assert before == {p: p.stat().st_mtime_ns for p in before}
    unbundle(stack)
    again = unbundle(stack)
    assert "packages: already unpacked" in again.stderr
    assert "export PYTHONPATH=" in again.stdout


def test_a_change_of_the_fork_sends_one_part(stack):
    bundle(stack, "--split", "2")
    unbundle(stack)
    kept = {p: p.read_bytes() for p in stack.glob("out/part[123]/*.tar.xz.*")}
    write_files(stack, {"vllm/vllm/new.py": "NEW = 1\n"})
    (stack / "vllm/vllm/ours.py").unlink()
    bundle(stack, "--split", "2")
    assert kept == {p: p.read_bytes() for p in kept}
    done = unbundle(stack)
    assert "packages: already unpacked" in done.stderr
    assert "upstream: already unpacked" in done.stderr
    got = tree_of(stack / "a prefix")
    assert "fork/vllm/new.py" in got
    assert "fork/vllm/ours.py" not in got


def test_fewer_parts_than_before_leave_none_behind(stack):
    bundle(stack, "--split", "3")
    bundle(stack, "--split", "1")
    folders = sorted(p.name for p in (stack / "out").glob("part*"))
    assert folders == ["part1", "part2", "part3"]
    assert unbundle(stack).returncode == 0


def test_a_missing_part(stack):
    bundle(stack, "--split", "3")
    (stack / "out/part2/packages.tar.xz.002").unlink()
    done = unbundle(stack)
    assert done.returncode == 1
    assert done.stderr == (
        f"unbundle.sh: missing in {stack}/out: part2/packages.tar.xz.002; "
        "send them too\n"
    )
    assert not (stack / "a prefix").exists()


def test_a_damaged_part(stack):
    bundle(stack, "--split", "2")
    part = stack / "out/part2/packages.tar.xz.002"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    done = unbundle(stack)
    assert done.returncode == 1
    assert done.stderr == (
        f"unbundle.sh: {part} is damaged (sha256 differs): send it again\n"
    )
    assert not (stack / "a prefix").exists()


def test_a_missing_archive(stack):
    bundle(stack)
    for part, archive in ((3, "fork"), (2, "upstream")):
        for path in (stack / f"out/part{part}").iterdir():
            path.unlink()
        assert unbundle(stack).stderr == (
            f"unbundle.sh: no part of the archive '{archive}' is in {stack}/out\n"
        )


def test_a_file_may_move_to_another_archive(stack):
    bundle(stack)
    unbundle(stack)
    # As an earlier fork archive had it, which comes after this one.
    stamp = stack / "a prefix/.bundle/fork.json"
    old = json.loads(stamp.read_text())
    names = [*old["names"], "upstream/tests/test_a.py"]
    stamp.write_text(json.dumps({"inputs": "older", "names": names}))
    (stack / "a prefix/.bundle/upstream.json").unlink()
    assert unbundle(stack).returncode == 0
    assert (stack / "a prefix/upstream/tests/test_a.py").exists()


def test_bytecode_of_an_older_fork_is_not_used(stack):
    script = (
        f'eval "$({UNBUNDLE} --parts {str(stack / "out")!r} '
        f'--prefix {str(stack / "a prefix")!r})"\n'
        f"{sys.executable} -c 'import vllm.ours; print(vllm.ours.WHO)'"
    )
    said = []
    for who in ("us", "we"):
        write_files(stack, {"vllm/vllm/ours.py": f"WHO = '{who}'\n"})
        bundle(stack)
        env = {**os.environ, "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": ""}
        done = subprocess.run(
            ["bash", "-ec", script], capture_output=True, text=True, env=env
        )
        said.append(done.stdout)
        if who == "us":
            assert list(stack.glob("a prefix/fork/vllm/__pycache__/ours.*.pyc"))
            time.sleep(1)
    assert said == ["us\n", "we\n"]


def test_parts_of_two_bundles(stack):
    bundle(stack)
    (stack / "out/part1").rename(stack / "out/older")
    write_files(stack, {"vllm/vllm/_C.abi3.so": "another"})
    bundle(stack)
    done = unbundle(stack)
    assert done.returncode == 1
    assert "two bundles of packages: remove the older ones" in done.stderr


def test_parts_may_lie_elsewhere(stack):
    bundle(stack, "--split", "2")
    for part in list(stack.glob("out/part*/*")):
        part.replace(stack / "out" / part.name)
    assert unbundle(stack).returncode == 0


def test_an_interrupted_unpack_is_done_again(stack):
    bundle(stack)
    unbundle(stack)
    lost = stack / "a prefix/site/lack_it/__init__.py"
    lost.unlink()
    (stack / "a prefix/.bundle/packages.json").unlink()
    assert unbundle(stack).returncode == 0
    assert lost.exists()


def test_another_python(stack):
    bundle(stack, python="3.99")
    assert unbundle(stack).stderr == (
        f"unbundle.sh: the bundle is for Python 3.99, this is {HERE}\n"
    )


def test_too_few_parts(stack, capsys):
    noise = random.Random(1).randbytes(3 << 20)
    (stack / "vllm/vllm/_C.abi3.so").write_bytes(noise)
    assert bundle(stack, "--split", "2", "--part-mib", "1") == cli.FAILED
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        "error: packages.tar.xz is 3 MiB: 2 parts would be over 1 MiB each; "
        "use --split 4 or more"
    )
    assert not list(stack.glob("out/*/*.tar.xz*"))
    assert bundle(stack, "--part-mib", "1") == 0
    assert len(manifest(stack, "packages")["parts"]) == 4


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (
            lambda s: (s / "vllm/pyproject.toml").unlink(),
            "is not an applied tree",
        ),
        (
            lambda s: (s / "vllm/pyproject.toml").write_text("[project]\n"),
            "run scripts/apply.sh first",
        ),
        (lambda s: (s / "have.txt").unlink(), "have.txt: there is no such file"),
        (
            lambda s: (s / "have.txt").write_text("one two three\n"),
            "have.txt, line 1: expected 'name' or 'name version'",
        ),
        (
            lambda s: (s / "upstream.toml").write_text(
                (s / "upstream.toml").read_text().replace("vllm/ours", "vllm/gone")
            ),
            "vllm-1.tar.gz holds no vllm/gone.py",
        ),
        (
            lambda s: [p.unlink() for p in (s / "vllm").rglob("*.so")],
            "has no compiled extensions: run scripts/apply.sh",
        ),
    ],
)
def test_bad_input_is_one_line(stack, capsys, spoil, line):
    spoil(stack)
    assert bundle(stack) == cli.FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert line in last
    assert not list(stack.glob("out/part*"))


def test_unknown_package_to_carry(stack, capsys):
    assert bundle(stack, "--with", "nonsense") == cli.FAILED
    assert "skip.txt leaves out no such package" in capsys.readouterr().err


def test_a_resolver_failure_is_one_line(stack, capsys):
    uv = stack.parent / "bin" / "uv"
    uv.write_text("#!/bin/sh\necho 'no network' >&2\nexit 2\n")
    assert bundle(stack) == cli.FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: the packages could not be resolved: no network"


def test_names_are_compared_as_indexes_do():
    assert packages.canonical("Foo__bar.Baz") == "foo-bar-baz"


def test_the_example_list_can_be_read():
    have = packages.read_have(ROOT / "ci/bundle/have-cuda13-torch211.txt")
    assert have["torch"] == "2.11.0"
    assert have["aiohttp"] is None


@pytest.mark.parametrize("name", ["skip.txt", "trim.txt", "test_packages.txt"])
def test_every_entry_has_a_reason(name):
    path = ROOT / "ci" / "bundle" / name
    assert patterns.read(path)
    assert path.read_text().startswith("#")


def test_patterns():
    listed = ["a/b", "c/*.so"]
    assert patterns.matches("a/b", listed)
    assert patterns.matches("a/b/c/d", listed)
    assert patterns.matches("c/x.so", listed)
    assert not patterns.matches("a/bc", listed)


def test_another_sdist_than_the_pinned_one(stack, capsys):
    write_files(stack, {"../vllm-1.tar.gz": "another"})
    assert bundle(stack) == cli.FAILED
    assert "upstream.toml pins " in capsys.readouterr().err


def test_a_version_needs_no_import(tmp_path):
    write_files(
        tmp_path,
        {
            "pyproject.toml": '[project]\nname = "vllm"\ndependencies = []\n',
            "vllm/_version.py": 'raise SystemExit\n__version__ = "9"\n',
        },
    )
    assert distribution.read_project(tmp_path).version == "9"
    (tmp_path / "vllm/_version.py").write_text("")
    with pytest.raises(Fault, match="no version in"):
        distribution.read_project(tmp_path)
