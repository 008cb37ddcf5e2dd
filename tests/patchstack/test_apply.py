"""`apply` and `--unapply`: what they make, and what they refuse to lose."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time

import pytest
import synthetic

STEPPED = synthetic.ENGINE.replace("return step\n", "return step + 1\n", 1)
WIDENED = synthetic.RELEASE["vllm/layers.py"].replace("8", "16")
PATCHED = {"vllm/engine.py": STEPPED.encode(), "vllm/layers.py": WIDENED.encode()}
KEEP_OR_DROP = (
    "keep them with scripts/refresh.sh TOPIC (new files: --own PATH) or drop them with "
    "--discard-edits"
)


def test_tree_is_release_own_files_and_patches(bare, stacked):
    bare.ok("apply")
    assert bare.content() == synthetic.expected_tree(bare, {})
    stacked.ok("apply", "--unapply")
    out = stacked.ok("apply")
    assert stacked.content() == synthetic.expected_tree(stacked, PATCHED)
    name = json.loads((stacked.tree / ".stack.json").read_text())["identity"]
    lines = out.splitlines()
    assert lines[0].startswith(
        f"vLLM 9.9.0 + 2 patches + 5 own files, stack {name}: applied ("
    )
    assert lines[1:] == [
        "  base   11 files from the sdist",
        f"  wheel  2 files for {platform.machine()}",
        "next: pip install -e vllm",
    ]


def test_each_patch_is_a_commit_with_the_same_id_everywhere(stacked):
    log = ["--git-dir=.tree.git", "log", "--format=%H %an <%ae> %s"]
    first = stacked.git(*log)
    assert [line.split(" ", 1)[1] for line in first.splitlines()][2:] == [
        "upstream <upstream@localhost> vLLM 9.9.0"
    ]
    assert "Widen the layers" in first.splitlines()[0]
    stacked.ok("apply", "--unapply")
    stacked.ok("apply")
    assert stacked.git(*log) == first


def test_second_run_changes_nothing_and_is_quick(stacked):
    before = stacked.snapshot()
    started = time.monotonic()
    out = stacked.ok("apply")
    assert time.monotonic() - started < 1
    assert "nothing to do" in out
    assert stacked.snapshot() == before
    assert stacked.ok("apply", "--check").startswith("vllm/ is applied and unedited")


def test_json_tells_what_was_done(stacked):
    facts = json.loads(stacked.ok("apply", "--json"))
    assert facts["state"] == "unchanged"
    assert facts["base"] == "9.9.0"
    assert facts["patches"] == 2
    assert (
        json.loads(stacked.ok("apply", "--unapply", "--json"))["state"] == "unapplied"
    )
    done = stacked.run("apply", "--check", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["fault"] == (
        "vllm/ is not applied: run scripts/apply.sh"
    )


def test_wrong_base_says_which(bare, tmp_path):
    other = synthetic.make_upstream(tmp_path, "9.8.0")
    before = bare.snapshot()
    assert bare.fails("apply", "--from", str(other.sdist)) == (
        "your base is 9.8.0, this stack is for 9.9.0 (vllm-9.8.0.tar.gz): take the "
        "release itself: scripts/apply.sh without --from"
    )
    assert bare.snapshot() == before


# One that a patch touches, and one that only the wheel vouches for.
@pytest.mark.parametrize("name", ["engine.py", "dos.py"])
def test_other_text_of_the_right_version_is_refused(stacked, tmp_path, name):
    folder = unpacked(stacked.upstream.sdist, tmp_path)
    (folder / "vllm" / name).write_text("nothing\n")
    stacked.ok("apply", "--unapply")
    assert stacked.fails("apply", "--from", str(folder)) == (
        f"the base is not vLLM 9.9.0 as released: vllm/{name} differ: take the "
        "release itself: scripts/apply.sh without --from"
    )


def test_base_from_folder_or_clone(stacked, tmp_path):
    folder = unpacked(stacked.upstream.sdist, tmp_path)
    expected = stacked.content()
    # A build in that folder is no part of the base.
    (folder / "vllm" / "_C.abi3.so").write_bytes(b"another build")
    (folder / "vllm" / "_old_C.so").write_bytes(b"another build")
    stacked.ok("apply", "--unapply")
    stacked.ok("apply", "--from", str(folder))
    assert stacked.content() == expected
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=A", "-c", "user.email=a@b", "commit", "-q", "-m", "x"],
        ["tag", "v9.9.0"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    # The user's own settings must not reach what the clone lays.
    (stacked.repo.parent / "home").mkdir(exist_ok=True)
    (stacked.repo.parent / "home" / ".gitconfig").write_text(
        "[core]\nautocrlf = true\n"
    )
    stacked.ok("apply", "--unapply")
    stacked.ok("apply", "--from", f"file://{folder}@v9.9.0")
    assert stacked.content() == expected
    stacked.ok("apply", "--unapply")
    error = stacked.fails("apply", "--from", f"file://{folder}@v1")
    assert error.startswith(f"cannot clone file://{folder} at v1: ")


def test_source_that_is_nothing(bare):
    assert bare.fails("apply", "--from", "nowhere") == (
        "--from nowhere: no such sdist, folder or GIT-URL@TAG"
    )
    assert bare.fails("apply", "--wheel", "nowhere.whl") == (
        "--wheel nowhere.whl: no such file"
    )
    assert bare.fails("apply", "--machine", "vax") == (
        f"no release wheel for 'vax': vLLM 9.9.0 has {synthetic.MACHINE}"
    )


@pytest.mark.parametrize("command", ["apply", "refresh", "status", "doctor"])
def test_help_and_unknown_option(bare, command):
    assert f"usage: scripts/{command}.sh" in bare.ok(command, "--help")
    done = bare.run(command, "--frobnicate")
    assert done.returncode == 2
    assert "unrecognized arguments: --frobnicate" in done.stderr


def test_local_edits_are_never_lost(stacked):
    stacked.edit("vllm/layers.py", "16", "32")
    (stacked.tree / "tools" / "run.sh").unlink()
    # Upstream's own .gitignore hides *.csv: it is an edit all the same.
    (stacked.tree / "results.csv").write_text("1\n")
    (stacked.tree / "vllm" / "_C.abi3.so").write_bytes(b"mine")
    before = stacked.snapshot()
    stacked.patch("step-by-two.patch").write_bytes(
        stacked.patch("step-by-two.patch").read_bytes().replace(b"it is", b"is")
    )
    error = (
        "vllm/ has local edits (changed: vllm/layers.py; deleted: tools/run.sh; new: "
        f"results.csv; changed binaries: vllm/_C.abi3.so): {KEEP_OR_DROP}"
    )
    for arguments in ([], ["--unapply"], ["--check"]):
        assert stacked.fails("apply", *arguments) == error
    stacked.git("checkout", "-q", "patches")
    assert stacked.snapshot() == before
    stacked.ok("apply", "--discard-edits")
    assert stacked.content() == synthetic.expected_tree(stacked, PATCHED)


def test_what_running_leaves_behind_is_no_edit(stacked):
    for path in ("vllm/__pycache__/x.pyc", "vllm.egg-info/PKG-INFO", ".triton/x"):
        place = stacked.tree / path
        place.parent.mkdir(parents=True)
        place.write_text("x")
    assert "nothing to do" in stacked.ok("apply")
    stacked.ok("apply", "--unapply")


def test_own_edits_survive_everything(stacked):
    ours = stacked.tree / "vllm" / "ours.py"
    ours.write_text("OURS = 'edited'\n")
    assert "nothing to do" in stacked.ok("apply")
    stacked.ok("apply", "--unapply", "--discard-edits")
    assert ours.read_text() == "OURS = 'edited'\n"
    identity = ours.stat().st_ino
    stacked.ok("apply", "--discard-edits")
    assert ours.read_text() == "OURS = 'edited'\n"
    assert ours.stat().st_ino == identity


def test_own_file_saved_during_apply_survives(bare):
    command = bare.inject("save:before:tree.place.swap", "apply")
    subprocess.run(command, env=bare.environment(), check=True, capture_output=True)
    assert bare.text("vllm/ours.py") == "OURS = 'saved meanwhile'\n"


def test_edit_made_during_apply_is_not_lost(stacked):
    stacked.patch("series").write_text("step-by-two.patch\n")
    done = subprocess.run(
        stacked.inject("edit:after:tree.place.lay_own", "apply"),
        env=stacked.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: vllm/ has local edits (changed: vllm/layers.py): {KEEP_OR_DROP}"
    )
    assert stacked.text("vllm/layers.py").endswith("EDITED = True\n")


def test_own_file_in_an_upstream_place_needs_a_pin(bare):
    for path in ("vllm/dos.py", "vllm/third_party/vendored.py"):
        place = bare.tree / path
        place.parent.mkdir(exist_ok=True)
        place.write_text("OURS = 1\n")
        names = [".gitignore", *synthetic.OWN, path]
        (bare.tree / ".gitignore").write_text(synthetic.own.render(names))
        assert bare.fails("apply") == (
            f"own file vllm/{path} is an upstream file: say why it takes its place: "
            f"scripts/refresh.sh --own vllm/{path} --why REASON"
        )
        place.unlink()


def test_unapply_leaves_git_clean(stacked):
    stacked.ok("apply", "--unapply")
    assert stacked.git("status", "--short", "--ignored") == "!! .tree.lock\n"
    left = {name for name in stacked.snapshot() if name.startswith("vllm/")}
    assert left == {f"vllm/{path}" for path in (".gitignore", *synthetic.OWN)}
    assert "holds only our own files" in stacked.ok("apply", "--unapply")


def test_applied_tree_leaves_git_clean(stacked):
    assert stacked.git("status", "--short") == ""


def test_files_in_the_way_of_the_first_apply(bare):
    (bare.tree / "vllm" / "notes.py").write_text("mine\n")
    before = bare.snapshot()
    assert bare.fails("apply") == (
        f"vllm/ holds what apply would lose (new: vllm/notes.py): {KEEP_OR_DROP}"
    )
    assert bare.snapshot() == before


def test_lost_history_is_made_again(stacked):
    expected = stacked.content()
    shutil.rmtree(stacked.repo / ".tree.git")
    assert stacked.fails("apply", "--check") == (
        "the tree's history is gone or changed: run scripts/apply.sh"
    )
    stacked.edit("vllm/layers.py", "16", "32")
    assert "vllm/layers.py" in stacked.fails("apply")
    stacked.edit("vllm/layers.py", "32", "16")
    stacked.ok("apply")
    assert stacked.content() == expected
    stacked.ok("apply", "--check")


def test_changed_stack_is_applied(stacked):
    series = stacked.patch("series")
    series.write_text("step-by-two.patch\n")
    stacked.patch("wide-layers.patch").unlink()
    assert stacked.fails("apply", "--check") == (
        "vllm/ was made from another stack: run scripts/apply.sh"
    )
    assert "applied" in stacked.ok("apply")
    assert stacked.content() == synthetic.expected_tree(
        stacked, {"vllm/engine.py": STEPPED.encode()}
    )


def test_reworded_patch_needs_no_new_tree(stacked):
    patch = stacked.patch("step-by-two.patch")
    patch.write_bytes(patch.read_bytes().replace(b"it is needed", b"steps are odd"))
    identity = (stacked.tree / "vllm" / "engine.py").stat().st_ino
    assert "already as the new stack makes it" in stacked.ok("apply")
    assert (stacked.tree / "vllm" / "engine.py").stat().st_ino == identity
    assert "steps are odd" in stacked.git("--git-dir=.tree.git", "log")
    stacked.ok("apply", "--check")


def test_edit_that_a_pulled_patch_also_makes_is_taken(bare, stacked):
    bare.ok("apply")
    bare.edit("vllm/engine.py", "return step\n", "return step + 1\n")
    bare.edit("vllm/layers.py", "8", "16")
    for name in ("patches", "upstream.toml"):
        pulled = stacked.repo / name
        if pulled.is_dir():
            shutil.copytree(pulled, bare.repo / name, dirs_exist_ok=True)
        else:
            shutil.copy2(pulled, bare.repo)
    assert "already as the new stack makes it" in bare.ok("apply")
    assert bare.content() == stacked.content()
    bare.ok("apply", "--check")


def test_crlf_files_modes_and_links(stacked):
    stacked.edit("vllm/dos.py", "B = 2\r\n", "B = 22\r\n")
    stacked.edit("tools/run.sh", "echo run", "echo ran")
    stacked.ok("refresh", "dos-and-run", *synthetic.header("Edit an odd file"))
    expected = stacked.content()
    stacked.ok("apply", "--unapply")
    stacked.ok("apply")
    assert stacked.content() == expected
    assert expected["vllm/vllm/dos.py"] == b"- A = 1\r\nB = 22\r\nC = 3\r\n"
    assert expected["vllm/tools/run.sh"] == b"x #!/bin/sh\necho ran\n"
    assert expected["vllm/docs/README.md"] == b"-> ../README.md"
    assert (stacked.tree / "tools" / "run.sh").stat().st_uid == os.geteuid()


def test_hostile_git_configuration(stacked):
    log = ["--git-dir=.tree.git", "log", "--format=%H"]
    expected, commits = stacked.content(), stacked.git(*log)
    stacked.surround_with_hostile_git()
    stacked.ok("apply", "--unapply")
    stacked.ok("apply")
    assert stacked.content() == expected
    assert stacked.git(*log) == commits
    assert "nothing to do" in stacked.ok("refresh")
    stacked.edit("vllm/layers.py", "16", "17")
    assert "wide-layers.patch: rewritten" in stacked.ok("refresh")
    stacked.ok("apply", "--check")


def test_any_folder_and_a_link_to_the_script(stacked, tmp_path):
    link = tmp_path / "linked apply"
    link.symlink_to(stacked.repo / "scripts" / "apply.sh")
    away = tmp_path / "away"
    (away / "patchstack").mkdir(parents=True)
    (away / "patchstack" / "__init__.py").write_text("raise SystemExit('shadowed')")
    for script in (link, stacked.repo / "scripts" / "apply.sh"):
        done = subprocess.run(
            [script, "--check"], cwd=away, env=stacked.environment(), check=False
        )
        assert done.returncode == 0


def test_shell_in_the_replaced_tree_is_told(stacked):
    inside = stacked.tree / "vllm"
    script = f"""
        cd '{inside}' &&
        ../../scripts/apply.sh --unapply &&
        '{stacked.repo}/scripts/apply.sh'
    """
    done = subprocess.run(
        ["sh", "-c", script], env=stacked.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = "  your shell stands in the folder that was replaced: cd to it again"
    assert told in done.stderr.splitlines()


def test_checkout_without_git(stacked):
    shutil.rmtree(stacked.repo / ".git")
    expected = stacked.content()
    stacked.ok("apply", "--unapply")
    stacked.ok("apply")
    assert stacked.content() == expected
    assert "rules hold" in stacked.ok("status", "--check")


def test_missing_python_or_git_is_one_line(bare, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "readlink"):
        (tools / name).symlink_to(shutil.which(name))
    bare.env["PATH"] = str(tools)
    assert bare.fails("apply") == (
        "python3 is not installed: install Python 3.11.4 or newer"
    )
    (tools / "git").symlink_to(shutil.which("git"))
    (tools / "python3").write_text(
        "#!/bin/sh\ncode=$5\nshift 5\n"
        f"exec '{sys.executable}' -c 'import sys; sys.version_info = (3, 9, 1); "
        'exec(sys.argv.pop(1))\' "$code" "$@"\n'
    )
    (tools / "python3").chmod(0o755)
    assert bare.fails("apply") == (
        "python3 is 3.9.1: put Python 3.11.4 or newer first on PATH"
    )
    (tools / "git").unlink()
    assert bare.fails("apply") == "git is not installed: install git"


def unpacked(sdist, folder):
    place = folder / "unpacked"
    place.mkdir()
    subprocess.run(
        ["tar", "xf", sdist, "-C", place, "--strip-components=1"], check=True
    )
    return place
