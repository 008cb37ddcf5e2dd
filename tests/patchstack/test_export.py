"""`export`: `git am` makes of a clean base what apply makes of it."""

import json
import os
import subprocess

import pytest
import synthetic
from patchstack.git import clean_environment


def git(folder, *args):
    who = {"GIT_COMMITTER_NAME": "Ada", "GIT_COMMITTER_EMAIL": "ada@example.org"}
    who |= {"GIT_AUTHOR_NAME": "Ada", "GIT_AUTHOR_EMAIL": "ada@example.org"}
    done = subprocess.run(
        ["git", *args],
        cwd=folder,
        env=clean_environment() | who,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def clone(upstream, folder):
    """Upstream's own repository at the release: what is built is not in it."""
    for path, data in upstream.files.items():
        if path.startswith("vllm.egg-info/"):
            continue
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        if path in synthetic.EXECUTABLE:
            place.chmod(0o755)
    for path, target in synthetic.LINKS.items():
        (folder / path).symlink_to(target)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "release")
    return folder


def files(folder):
    """Content and mode of what git has there."""
    listed = git(folder, "-c", "core.quotePath=false", "ls-files").splitlines()
    found = {}
    for path in listed:
        place = folder / path
        if place.is_symlink():
            found[f"vllm/{path}"] = b"-> " + os.fsencode(place.readlink())
        else:
            mode = b"x " if place.stat().st_mode & 0o100 else b"- "
            found[f"vllm/{path}"] = mode + place.read_bytes()
    return found


def test_am_makes_the_tree(stacked, tmp_path):
    stacked.edit("vllm/dos.py", "B = 2\r\n", "B = 3\r\n")
    stacked.ok("refresh", "naive", *synthetic.header("Count in a naïve way"))
    stacked.commit()
    out = tmp_path / "fork.mbox"
    assert stacked.ok("export", str(out)) == f"{out}: 5 mails for vLLM 9.9.0\n"
    folder = clone(stacked.upstream, tmp_path / "clone")
    git(folder, "am", "-q", str(out))
    wheel = {f"vllm/{path}" for path in synthetic.WHEEL_ONLY}
    tree = {path: it for path, it in stacked.content().items() if path not in wheel}
    assert files(folder) == tree
    assert git(folder, "log", "--format=%s").splitlines() == [
        "Count in a naïve way",
        "Widen the layers",
        "Step by two",
        "Add the own files of the fork",
        "Install the tree of the fork as it lies",
        "release",
    ]
    message = git(folder, "log", "-1", "--format=%B", "HEAD~1")
    assert message.strip() == (
        "Widen the layers\n\nWhy: it is needed\nUpstream-status: none\n"
        "Drop-when: tests/x.py::test_y\nTests: tests/x.py"
    )


def test_own_files_state_their_reasons(stacked, tmp_path):
    out = tmp_path / "fork.mbox"
    stacked.ok("export", str(out))
    text = out.read_text()
    assert "\npyproject.toml takes upstream's place: ours is better\n" in text
    assert "\nsetup.py goes: ours is better\n" in text
    assert "\nvllm/ours.py is new\n" in text


def test_it_is_the_same_each_time_and_everywhere(stacked, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    before = stacked.snapshot()
    stacked.ok("export", str(first))
    assert stacked.snapshot() == before
    stacked.git("config", "user.name", "Zoë")
    stacked.ok("apply", "--unapply")
    facts = json.loads(stacked.ok("export", str(second), "--json"))
    assert facts == {"mails": 4, "base": "9.9.0"}
    assert first.read_bytes() == second.read_bytes()


def test_hostile_git_configuration(stacked, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    stacked.ok("export", str(first))
    stacked.surround_with_hostile_git()
    stacked.ok("export", str(second))
    assert first.read_bytes() == second.read_bytes()


def test_what_upstreams_ignore_file_hides_is_in_no_clone(tmp_path):
    changes = {".gitignore": "*.csv\n/vllm/_version.py\n"}
    upstream = synthetic.make_upstream(tmp_path, "9.9.0", changes)
    checkout = synthetic.make_checkout(tmp_path, upstream)
    out = tmp_path / "fork.mbox"
    checkout.ok("export", str(out))
    folder = clone(upstream, tmp_path / "clone")
    (folder / "vllm" / "_version.py").unlink()
    git(folder, "am", "-q", str(out))
    assert (folder / "vllm" / "_version.py").read_text() == (
        synthetic.OWN["vllm/_version.py"]
    )


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("vllm/layers.py", "vllm/ has local edits (changed: vllm/layers.py)"),
        ("vllm/ours.py", "vllm/vllm/ours.py changed since the last commit"),
    ],
)
def test_edits_are_refused(stacked, tmp_path, path, fault):
    place = stacked.tree / path
    place.write_text(place.read_text() + "EDITED = True\n")
    out = tmp_path / "fork.mbox"
    assert stacked.fails("export", str(out)).startswith(fault)
    assert not out.exists()


def test_a_place_that_cannot_be_written(stacked, tmp_path):
    for out in (tmp_path, tmp_path / "no" / "fork.mbox"):
        assert stacked.fails("export", str(out)) == (
            f"{out} cannot be written as a file: name another OUT"
        )
