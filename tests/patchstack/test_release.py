"""The real release: what `apply` makes of it, against the release's own files."""

import email
import hashlib
import os
import shutil
import subprocess
import tarfile
import time
import tomllib
import zipfile

import pytest
import synthetic
from patchstack import stack
from patchstack.files import file_sha256
from patchstack.release import fetch
from patchstack.release.index import Index
from patchstack.stack import base
from patchstack.tree import edits

REPO = synthetic.REPO


@pytest.fixture(scope="module")
def pins():
    return base.load(REPO)


@pytest.fixture(scope="module")
def archives(pins):
    """The pinned sdist and this machine's wheel, from the cache or the index."""
    wheel = pins.wheel(synthetic.MACHINE)
    return [fetch.fetch(it, offline=False) for it in (pins.sdist, wheel)]


@pytest.fixture(scope="module")
def applied(archives, tmp_path_factory):
    """A copy of this repository's stack, applied."""
    repo = synthetic.copy_stack(tmp_path_factory.mktemp("release") / "repo")
    run(repo)
    yield stack.load(repo)
    shutil.rmtree(repo)


def run(repo):
    env = os.environ | {"PATCHSTACK_CACHE": str(fetch.cache_folder())}
    command = [repo / "scripts" / "apply.sh", "--offline"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_release_needs_no_special_file_system(archives):
    """Neither links nor names that differ in nothing but case."""
    with tarfile.open(archives[0]) as sdist:
        members = sdist.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    with zipfile.ZipFile(archives[1]) as wheel:
        files = {name for name in wheel.namelist() if not name.endswith("/")}
    files |= {it.name.partition("/")[2] for it in members if it.isfile()}
    assert len({name.casefold() for name in files}) == len(files)


def test_tree_is_the_release_apart_from_the_stack(applied, archives):
    expected = {}
    with tarfile.open(archives[0]) as sdist:
        for member in sdist:
            if member.isfile():
                path = member.name.partition("/")[2]
                expected[path] = digest(sdist.extractfile(member).read())
    upstream = set(expected)
    with zipfile.ZipFile(archives[1]) as wheel:
        for name in wheel.namelist():
            if name.startswith("vllm/"):
                found = digest(wheel.read(name))
                assert expected.setdefault(name, found) == found, name
    wheel_only = set(expected) - upstream
    assert any(path.endswith(".so") for path in wheel_only)

    place = applied.places.tree
    laid = {path: file_sha256(place / path) for path, _ in edits.scan(place)}
    ours = applied.touched.union(applied.own)
    given_way = {path for path in expected if applied.base.gives_way(path)}
    assert set(laid) == (set(expected) - given_way) | set(applied.own)
    differ = {path for path in laid if laid[path] != expected.get(path)}
    assert differ == ours
    assert all(laid[path] == expected[path] for path in wheel_only)


def digest(data):
    return hashlib.sha256(data).hexdigest()


def test_second_run_takes_less_than_a_second(applied):
    run(applied.places.repo)
    started = time.monotonic()
    assert "nothing to do" in run(applied.places.repo)
    assert time.monotonic() - started < 1


def test_all_rules_hold_but_git(applied):
    env = os.environ
    command = [applied.places.repo / "scripts" / "status.sh", "--check"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_requirements_are_those_of_the_wheel_and_ours(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        name = next(it for it in wheel.namelist() if it.endswith("/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
        entry_points = wheel.read(name.replace("METADATA", "entry_points.txt"))
    project = tomllib.loads((REPO / "vllm" / "pyproject.toml").read_text())["project"]
    ours = set(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        ours |= {f'{line}; extra == "{extra}"' for line in lines}
    assert ours - set(metadata.get_all("Requires-Dist")) == {"cuda-python>=13"}
    assert set(metadata.get_all("Requires-Dist")) <= ours
    extras = set(metadata.get_all("Provides-Extra"))
    assert set(project["optional-dependencies"]) == extras
    needed = metadata["Requires-Python"].split(",")
    assert set(project["requires-python"].split(",")) == set(needed)
    stated = project["scripts"] | project["entry-points"]["vllm.general_plugins"]
    for line in entry_points.decode().splitlines():
        key, equals, value = line.partition(" = ")
        assert not equals or stated.pop(key) == value
    assert not stated


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_index_has_the_pinned_wheels(pins, machine):
    archive = pins.wheel(machine)
    assert Index().offers()[archive.file].sha256 == archive.sha256
