"""Hostile surroundings: each run ends in the right result or in one line.

git's settings are in the tests of each command (`surround_with_hostile_git`), runs
that stop half way in `test_failures`.
"""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest
import synthetic


def made_again(checkout):
    """The tree and the commits, made from nothing."""
    checkout.ok("apply", "--unapply")
    checkout.ok("apply")
    log = ["git", "--git-dir=.tree.git", "log", "--format=%H"]
    commits = subprocess.check_output(log, cwd=checkout.repo, env={"PATH": os.defpath})
    return checkout.content(), commits


@pytest.fixture
def shadows(tmp_path):
    """A folder of modules that must not be imported."""
    for name in ("tomllib", "tarfile", "sitecustomize", "usercustomize", "patchstack"):
        place = tmp_path / "shadows" / f"{name}.py"
        place.parent.mkdir(exist_ok=True)
        place.write_text("raise SystemExit('shadowed')\n")
    return place.parent


@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "xx_YY.ISO-8859-1", "LANG": "xx"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONINSPECT": "1"},
        {"PYTHONOPTIMIZE": "2", "PYTHONHASHSEED": "7"},
        {"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"},
        {"PYTHONHOME": "/nowhere"},
        {"PYTHONPATH": "{shadows}"},
        {"TMPDIR": "/nowhere"},
        {"HOME": ""},
        {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "XDG_CONFIG_HOME": "."},
        {"CDPATH": "/", "ENV": "/nowhere", "BASH_ENV": "/nowhere", "IFS": "/"},
        {"TZ": "Asia/Kathmandu", "SOURCE_DATE_EPOCH": "1"},
        {"COLUMNS": "1", "TERM": "nonsense", "FORCE_COLOR": "1"},
    ],
    ids=lambda it: " ".join(it),
)
def test_environment_variables(stacked, variables, shadows):
    expected = made_again(stacked)
    for name, value in variables.items():
        stacked.env[name] = value.format(shadows=shadows)
    assert made_again(stacked) == expected
    assert "nothing to do" in stacked.ok("refresh")
    assert "rules hold" in stacked.ok("status", "--check")


def test_user_packages_are_not_ours(stacked, shadows):
    tag = sysconfig.get_python_version()
    site = stacked.repo.parent / "home" / ".local" / "lib" / f"python{tag}"
    shutil.copytree(shadows, site / "site-packages")
    stacked.ok("apply")


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777 & ~0o700])
def test_umask(stacked, umask):
    expected = made_again(stacked)
    before = os.umask(umask)
    try:
        assert made_again(stacked) == expected
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "name",
    [
        "line\nfeed",
        "at the end\n",
        os.fsdecode(b"bytes \xff\xfe"),
        "-n --$(false) `false` \"'; *?[a-z]{b,c}",
        "x" * 255,
        "/".join(["y" * 200] * 15),
        ".hidden",
    ],
    ids=["feed", "last-feed", "bytes", "shell", "long", "deep", "hidden"],
)
def test_folder_names(stacked, tmp_path, name):
    expected, _ = made_again(stacked)
    repo = tmp_path / "moved" / name
    repo.parent.mkdir(parents=True)
    stacked.repo.rename(repo)
    moved = synthetic.Checkout(
        repo, stacked.upstream, stacked.cache, {"PATH": stacked.environment()["PATH"]}
    )
    found, _ = made_again(moved)
    assert found == expected
    assert "rules hold" in moved.ok("status", "--check")
    (repo / "upstream.toml").unlink()
    shown = str(repo).replace("\n", "\\n")
    shown = shown.encode(errors="backslashreplace").decode()
    assert moved.fails("apply") == (
        f"{shown}/upstream.toml is missing: restore it from git"
    )


@pytest.mark.parametrize(
    "name", ["bytes \udcff", "a\nb", "tail ", "a[1].py", "b*", "c?", "back\\slash"]
)
def test_names_that_no_list_can_hold(stacked, name):
    place = stacked.tree / name
    place.write_text("x\n")
    before = stacked.snapshot()
    shown = name.replace("\n", "\\n").replace("\udcff", "\\udcff")
    assert stacked.fails("refresh", "--own", f"vllm/{name}") == (
        f"vllm/{shown} cannot be listed in .gitignore: give it a plain name"
    )
    assert stacked.fails("apply", "--check").startswith(
        f"vllm/ has local edits (new: {shown}): keep them with "
    )
    assert stacked.snapshot() == before


@pytest.mark.parametrize("name", ["ü#1", "#x", "!y", "a b", "a'b"])
def test_odd_names_of_own_files(stacked, name):
    (stacked.tree / "vllm" / name).write_text("x\n")
    stacked.ok("refresh", "--own", f"vllm/vllm/{name}")
    stacked.commit()
    assert "rules hold" in stacked.ok("status", "--check")
    expected = stacked.content()
    stacked.ok("apply", "--unapply")
    stacked.ok("apply")
    assert stacked.content() == expected


def test_names_of_tracked_files_may_be_any_bytes(stacked, tmp_path):
    (stacked.repo / "bytes \udcff").write_text("x\n")
    stacked.commit()
    assert "rules hold" in stacked.ok("status", "--check")
    stacked.ok("export", str(tmp_path / "fork.mbox"))


def test_base_with_names_of_any_bytes(stacked, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    unpack = ["tar", "xf", stacked.upstream.sdist, "-C", folder, "--strip-components=1"]
    subprocess.run(unpack, check=True)
    (folder / "bytes \udcff").write_text("x\n")
    stacked.ok("apply", "--unapply")
    stacked.ok("apply", "--from", str(folder))
    assert (stacked.tree / "bytes \udcff").exists()
    stacked.ok("apply", "--check")


def test_links_and_devices_among_the_files(stacked):
    (stacked.tree / "loop").symlink_to("loop")
    os.mkfifo(stacked.tree / "pipe")
    error = stacked.fails("apply", "--check")
    assert error.startswith("vllm/ has local edits (new: loop, pipe): ")
    stacked.ok("apply", "--discard-edits")
    stacked.ok("apply", "--check")


def test_checkout_of_another_user(stacked, tmp_path):
    """Git itself refuses to work in such a folder."""
    if os.geteuid():
        pytest.skip("giving files away needs root")
    for place in [stacked.repo, *stacked.repo.rglob("*")]:
        os.chown(place, 12345, 12345, follow_symlinks=False)
    made_again(stacked)
    assert "rules hold" in stacked.ok("status", "--check")
    stacked.ok("export", str(tmp_path / "fork.mbox"))


@pytest.mark.parametrize("place", ["patches", "cache"])
def test_folder_that_cannot_be_written(stacked, mount, place):
    """Permissions do not bind root, a file system that is read-only does."""
    folder = stacked.cache if place == "cache" else stacked.repo / place
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)
    stacked.edit("vllm/layers.py", "16", "32")
    before = stacked.snapshot()
    if place == "cache":
        stacked.ok("refresh")
        stacked.ok("apply", "--unapply")
        stacked.ok("apply")
        return
    assert stacked.fails("refresh") == (
        f"{folder}/wide-layers.patch.part: Read-only file system: mend that and "
        "run again"
    )
    assert stacked.snapshot() == before
    assert not (stacked.repo / ".tree.undo").exists()


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("upstream.toml", "{} is not UTF-8 text (byte 0): restore it from git"),
        ("patches/series", "{} is not UTF-8 text (byte 0): restore it from git"),
        ("vllm/.gitignore", "{} is not UTF-8 text (byte 0): restore it from git"),
        ("vllm/vllm/_version.py", "{} is not UTF-8 text (byte 0): restore it from git"),
    ],
)
def test_damaged_text(stacked, file, remedy):
    place = stacked.repo / file
    place.write_bytes(b"\xff" + place.read_bytes())
    assert stacked.fails("status") == remedy.format(place)


@pytest.mark.parametrize("name", ["objects", "index", "HEAD", "config", "refs"])
@pytest.mark.parametrize("content", [b"", b"junk [\n"])
def test_damaged_history(stacked, name, content):
    """Either it does no harm, or the line says what mends it."""
    expected = stacked.content()
    history = stacked.repo / ".tree.git"
    files = [
        it for it in [history / name, *(history / name).rglob("*")] if it.is_file()
    ]
    for file in files:
        file.chmod(0o644)
        file.write_bytes(content)
    done = stacked.run("apply")
    if done.returncode:
        error = done.stderr.splitlines()[-1]
        assert error.startswith("error: git failed: "), error
        assert error.endswith(
            ": if .tree.git is damaged, delete it and run scripts/apply.sh, which "
            "makes it again"
        )
        assert stacked.content() == expected
        shutil.rmtree(history)
        stacked.ok("apply")
    assert stacked.content() == expected
    stacked.ok("apply", "--check")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b'{"a": 1}', b"\xff"])
@pytest.mark.parametrize("name", [".stack.json", ".stack.wheel.json"])
def test_damaged_marker(stacked, name, content):
    expected = stacked.content()
    (stacked.tree / name).write_bytes(content)
    if name == ".stack.wheel.json":
        assert stacked.fails("apply").startswith(
            "vllm/ has local edits (new: vllm/_C.abi3.so, vllm/third_party/vendored.py)"
        )
    stacked.ok("apply", "--discard-edits")
    assert stacked.content() == expected
    stacked.ok("apply", "--check")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        (".tree.lock", "Is a directory"),
        (".tree.new", "Not a directory"),
        (".tree.git", "Not a directory"),
    ],
)
def test_something_else_in_a_place_of_ours(bare, name, word):
    place = bare.repo / name
    if word == "Is a directory":
        place.mkdir()
    else:
        place.write_text("mine\n")
    before = bare.snapshot()
    error = bare.fails("apply")
    assert error.endswith(f"{place}: {word}: mend that and run again")
    assert bare.snapshot() == before


@pytest.mark.parametrize("place", ["cache", "cache/archives", "cache/archives/{sdist}"])
def test_file_where_the_cache_is(bare, place):
    digest = synthetic.sha256(bare.upstream.sdist.read_bytes())
    path = bare.repo.parent / place.format(sdist=digest)
    shutil.rmtree(path)
    path.write_text("mine\n")
    before = bare.snapshot()
    error = bare.fails("apply")
    assert error.startswith(str(path))
    assert error.endswith((": Not a directory: mend that and run again",
                           ": File exists: mend that and run again"))  # fmt: skip
    assert bare.snapshot() == before


def test_user_without_a_home(bare):
    """As in a container that runs under a number."""
    if os.geteuid():
        pytest.skip("another user needs root")
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); "
        "from patchstack.release import fetch; os.setuid(4242); fetch.cache_folder()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(bare.repo / "scripts")],
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[-1] == (
        "patchstack.errors.StackError: HOME is not set, so there is no place for the "
        "cache: set PATCHSTACK_CACHE to a folder of yours"
    )


@pytest.fixture
def overlaid(stacked, mount, tmp_path):
    """The checkout as a container's image has it: in a lower layer."""
    merged, upper, work = (tmp_path / it for it in ("merged", "upper", "work"))
    for folder in (merged, upper, work):
        folder.mkdir()
    lower = tmp_path / "lower"
    stacked.repo.rename(lower)
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mount("-t", "overlay", "-o", layers, "overlay", merged)
    return synthetic.Checkout(merged, stacked.upstream, stacked.cache)


def test_layers_of_a_container(overlaid):
    expected = overlaid.content()
    overlaid.edit("vllm/layers.py", "16", "17")
    overlaid.ok("refresh")
    overlaid.edit("vllm/layers.py", "17", "16")
    overlaid.ok("refresh")
    assert made_again(overlaid)[0] == expected
    assert not (overlaid.repo / ".tree.new").exists()
    assert "rules hold" in overlaid.ok("status", "--check")


@pytest.mark.parametrize(
    "point",
    [
        "before:tree.place.shutil.rmtree*1",
        "after:tree.place.shutil.rmtree*1",
        "after:tree.place.move",
    ],
)
def test_killed_while_a_folder_is_copied_away(overlaid, point):
    command = overlaid.inject(f"kill:{point}", "apply", "--unapply")
    expected = overlaid.content()
    done = subprocess.run(command, env=overlaid.environment(), capture_output=True)
    assert done.returncode == -9
    overlaid.ok("apply")
    assert overlaid.content() == expected
    overlaid.ok("apply", "--check")


def test_stdout_that_is_gone(stacked):
    for redirect, code, said in (
        (">/dev/full", 1, "error: the disk is full"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&-", 0, ""),
        ("| true", 0, ""),
    ):
        done = subprocess.run(
            ["sh", "-c", f"scripts/status.sh {redirect}"],
            cwd=stacked.repo,
            env=stacked.environment(),
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr.splitlines()[1:]) == (code, []), redirect
        assert done.stderr.startswith(said), redirect
