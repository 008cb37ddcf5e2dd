"""What the tool can say: the texts that no other test has, and that none is missed."""

import ast
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import synthetic
from patchstack import git, progress, stack
from patchstack.check import doctor
from patchstack.check.doctor import Facts, WrongVersion
from patchstack.drift.compare import Finding, Level
from patchstack.errors import StackError
from patchstack.rebase import carry, report
from patchstack.rebase.carry import Outcome
from patchstack.rebase.report import FileRow, PatchRow, Report, Requirements
from patchstack.rebase.trial import OwnFile, OwnState, State
from patchstack.release import archive, fetch
from patchstack.release.index import Index, Link
from patchstack.stack import patch as format_
from patchstack.stack.base import Archive


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


MISSING = (
    "own file vllm/vllm/ours.py is missing: restore it from git, or take it off the "
    "list: scripts/refresh.sh --disown vllm/vllm/ours.py"
)


def toml(it):
    return it.repo / "upstream.toml"


def give_engine_way(it):
    with toml(it).open("a") as pins:
        pins.write('\n[[removes]]\npath = "vllm/engine.py"\nsha256 = "0"\nwhy = "x"\n')


def edit_a_file_that_is_not_there(it):
    place = it.patch("step-by-two.patch")
    place.write_text(place.read_text().replace("vllm/engine.py", "vllm/gone.py"))


def pull_another_base(it):
    rewrite(toml(it), 'version = "9.9.0"', 'version = "9.8.0"')


def link_the_tree(it):
    it.tree.rename(it.repo / "elsewhere")
    it.tree.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("breaks", "command", "error"),
    [
        (
            lambda it: (it.tree / ".gitignore").write_text(
                synthetic.own.render([".gitignore", "pyproject.toml"])
            ),
            ["apply"],
            "upstream.toml lets own files replace vllm/_version.py, but "
            "vllm/.gitignore does not list it: add it with scripts/refresh.sh --own",
        ),
        (
            give_engine_way,
            ["apply"],
            "a patch edits vllm/engine.py, which upstream.toml replaces or removes: "
            "edit the own file in place instead",
        ),
        (
            edit_a_file_that_is_not_there,
            ["apply"],
            "patches/step-by-two.patch: vllm/gone.py is not in the base: "
            "scripts/refresh.sh --reseal, or make the edit again in the tree",
        ),
        (
            lambda it: None,
            ["apply", "--offline", "--from", "https://localhost/x@v1"],
            "--offline and https://localhost/x@v1 exclude each other: drop one",
        ),
        (
            lambda it: (it.tree / "vllm" / "ours.py").unlink(),
            ["apply", "--unapply"],
            MISSING,
        ),
        *(
            (lambda it: (it.tree / "vllm" / "ours.py").unlink(), command, MISSING)
            for command in (
                ["apply"],
                ["apply", "--check"],
                ["refresh"],
                ["refresh", "--reseal"],
                ["export", "{repo}/out"],
            )
        ),
        (
            lambda it: (it.tree / ".gitignore").unlink(),
            ["status"],
            "{repo}/vllm/.gitignore is missing: restore it (git checkout -- vllm)",
        ),
        (
            lambda it: it.patch("step-by-two.patch").unlink(),
            ["status"],
            "patches/step-by-two.patch is in patches/series but missing: restore "
            "it from git or take it off the series",
        ),
        (
            link_the_tree,
            ["status"],
            "{repo}/vllm is a link: make it a folder of this checkout",
        ),
        (
            pull_another_base,
            ["refresh"],
            "vllm/ is made from vLLM 9.9.0, the stack is for 9.8.0: run "
            "scripts/apply.sh first",
        ),
        (
            lambda it: (it.tree / "new").write_text(""),
            ["refresh"],
            "new files (new) go into no patch: take them as own files "
            "(scripts/refresh.sh --own PATH), delete them, or name the PATHs to "
            "refresh",
        ),
        (
            lambda it: (it.tree / "vllm" / "_C.abi3.so").write_bytes(b""),
            ["refresh"],
            "files of the wheel (vllm/_C.abi3.so) cannot be patched: put them back "
            "with scripts/apply.sh --discard-edits, or name the PATHs to refresh",
        ),
        (
            lambda it: (it.tree / "vllm" / "ours.py").write_text(""),
            ["export", "{repo}/out"],
            "vllm/vllm/ours.py changed since the last commit: commit first",
        ),
        (
            lambda it: None,
            ["doctor", "--python", "/bin/false"],
            "/bin/false cannot be inspected: no message",
        ),
    ],
)
def test_error(stacked, breaks, command, error):
    breaks(stacked)
    before = stacked.snapshot()
    command = [part.format(repo=stacked.repo) for part in command]
    assert stacked.fails(*command) == error.format(repo=stacked.repo)
    assert stacked.snapshot() == before


def test_number_of_faults(stacked):
    place = stacked.repo / "patches" / "left"
    place.write_text("")
    done = stacked.run("status", "--check")
    assert synthetic.said(done.stderr) == ["error: 1 fault: mend each as its line says"]
    assert done.stdout == "patches/left is not in patches/series: add or delete it\n"
    place.unlink()
    found = stacked.ok("status", "--check")
    digest = stack.load(stacked.repo).digest[:12]
    assert found == f"10 rules hold (stack {digest})\n"
    done = stacked.run("doctor", "--python", sys.executable)
    assert done.returncode == 1
    assert "  importing vllm\n" in done.stderr
    assert done.stderr.endswith(" faults: mend each as its line says\n")


def test_words_of_apply(stacked):
    found = stacked.ok("apply", "--check")
    digest = stack.load(stacked.repo).digest[:12]
    assert found == f"vllm/ is applied and unedited (stack {digest})\n"
    found = stacked.ok("apply", "--unapply")
    assert re.sub(r"\d\.\d", "0.0", found) == "vllm/ holds only our own files (0.0 s)\n"
    done = stacked.run("apply")
    assert synthetic.said(done.stderr) == [
        f"  unpacking {stacked.upstream.sdist.name}",
        "  recording 15 files of the base",
        f"  unpacking {stacked.upstream.wheel.name}",
    ]
    (stacked.repo / ".tree.new").mkdir()
    assert synthetic.said(stacked.run("apply").stderr) == [
        "  cleaning up after an interrupted run"
    ]


def test_tree_for_another_machine(bare):
    wheel = synthetic.sha256(bare.upstream.wheel.read_bytes())
    name = bare.upstream.wheel.name
    entry = f'vax = {{ file = "{name}", sha256 = "{"0" * 64}" }}\n'
    rewrite(toml(bare), "[base.wheels]\n", "[base.wheels]\n" + entry)
    assert wheel in toml(bare).read_text()
    bare.ok("apply")
    assert bare.fails("apply", "--check", "--machine", "vax") == (
        f"vllm/ is made for {synthetic.MACHINE}: run scripts/apply.sh"
    )


def test_mount_point(stacked, mount):
    mount("--bind", stacked.tree, stacked.tree)
    assert stacked.fails("apply", "--unapply") == (
        f"{stacked.tree} is a mount point: mount its parent folder instead"
    )


def test_rules_on_what_gives_way(stacked):
    rewrite(toml(stacked), 'why = "ours is better"', 'why = " "')
    lines = stacked.run("status", "--check").stdout.splitlines()
    assert "upstream.toml: .gitignore gives way without a why: state it" in lines
    give_engine_way(stacked)
    lines = stacked.run("status", "--check").stdout.splitlines()
    assert (
        "a patch edits vllm/engine.py, which upstream.toml replaces or removes: edit "
        "the own file in place instead"
    ) in lines


def test_pins_that_are_no_toml(stacked):
    toml(stacked).write_text("[base\n")
    error = stacked.fails("status")
    assert error.startswith("upstream.toml is not valid TOML: Expected ")


def test_own_files_without_git(stacked):
    shutil.rmtree(stacked.repo / ".git")
    rows = json.loads(stacked.ok("status", "--json"))["own"]
    assert {row["state"] for row in rows} == {"no git"}


def test_kinds_of_edits(stacked):
    (stacked.tree / "README.md").unlink()
    (stacked.tree / "vllm" / "_C.abi3.so").unlink()
    lines = stacked.ok("status").splitlines()
    assert (
        "edit     deleted: vllm/README.md (put back, or [[removes]] in upstream.toml)"
    ) in lines
    assert (
        "edit     binaries: vllm/vllm/_C.abi3.so (files of the wheel: "
        "scripts/apply.sh --discard-edits)"
    ) in lines


def test_file_that_is_ours_no_more(stacked):
    assert stacked.ok("refresh", "--disown", "vllm/vllm/ours.py") == (
        "vllm/vllm/ours.py: no longer an own file\n"
    )


def test_unreadable_archives(tmp_path):
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk")
    with pytest.raises(StackError) as fault:
        archive.unpack_sdist(junk, tmp_path / "into")
    assert str(fault.value).startswith(f"{junk} is not a readable sdist: ")
    with pytest.raises(StackError) as fault:
        archive.Wheel(junk)
    assert str(fault.value).startswith(f"{junk} is not a readable wheel: ")
    two = tmp_path / "two.tar.gz"
    synthetic.write_sdist(two, "a", {"../b/x": b""}, {})
    with pytest.raises(StackError) as fault:
        archive.unpack_sdist(two, tmp_path / "into")
    assert str(fault.value) == f"{two} is not an sdist: it has no single top folder"
    bare_zip = tmp_path / "bare.whl"
    with archive.zipfile.ZipFile(bare_zip, "w") as file:
        file.writestr("vllm/x.py", "")
    with pytest.raises(StackError) as fault:
        archive.Wheel(bare_zip)
    assert str(fault.value) == f"{bare_zip} is not a readable wheel: no RECORD"


SDIST = Archive("vllm-1.tar.gz", "0" * 64)


@pytest.mark.parametrize(
    ("does", "error"),
    [
        (
            lambda to: fetch.fetch(SDIST, False),
            "the package index has no vllm-1.tar.gz: check pip's index settings, or "
            "give the file (--from FILE)",
        ),
        (
            lambda to: fetch.find_wheel("1", "vax", True),
            "vllm-1-*_vax.whl is not in the cache ({cache}): run once without "
            "--offline",
        ),
        (
            lambda to: fetch.newest(),
            "the package index has no sdist of vLLM: check its settings",
        ),
        (
            lambda to: Index().fetch(Link("x", "http://127.0.0.1:9/x", None), to / "x"),
            "cannot fetch x: <urlopen error [Errno 111] Connection refused>: check the "
            "network or pip's index settings",
        ),
    ],
)
def test_index_that_has_nothing(monkeypatch, capfd, tmp_path, does, error):
    monkeypatch.setenv("PATCHSTACK_CACHE", str(tmp_path))
    settings = {"index-url": [(tmp_path / "index").as_uri()]}
    monkeypatch.setattr(Index, "settings", settings)
    with pytest.raises(StackError) as fault:
        does(tmp_path)
    assert str(fault.value) == error.format(cache=tmp_path)
    if "index has" in error:
        assert capfd.readouterr().err == "  asking the package index for vllm\n"


def test_no_pip(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StackError) as fault:
        Index().offers()
    assert str(fault.value) == (
        "/bin/false has no pip, whose settings say where the package index is: install "
        "it (python3-pip), or give the files: scripts/apply.sh --from SDIST --wheel "
        "WHEEL"
    )


def test_cache_that_cannot_be_written(monkeypatch, tmp_path, stacked, mount):
    place = tmp_path / "full"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", place)
    stacked.ok("apply", "--unapply")
    stacked.env["PATCHSTACK_CACHE"] = str(place)
    error = stacked.fails("apply")
    assert error.startswith("cannot write to the cache: [Errno 30] ")
    assert error.endswith(": set PATCHSTACK_CACHE to a folder of yours")


def test_dropped_from_the_cache(bare, capfd):
    place = next(bare.cache.glob("archives/*/*.tar.gz"))
    place.write_bytes(b"junk")
    done = bare.run("apply", "--offline")
    assert synthetic.said(done.stderr)[0] == (
        f"  dropped {place}: its content is not what upstream.toml pins"
    )


def test_program_that_fails_in_silence():
    with pytest.raises(git.GitError) as fault:
        git.call(["/bin/false"], {})
    assert str(fault.value) == "no message"


def test_unknown_command(bare):
    done = subprocess.run(
        bare.inject("none:before:tree.place.swap", "frobnicate"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "error: no such command: 'frobnicate'\n"


def test_patch_without_a_mail():
    with pytest.raises(StackError) as fault:
        format_.parse("a.patch", b"From 0\nDate: b\nSubject: c\n\ndiff --git ")
    assert str(fault.value) == (
        "patches/a.patch is not a git format-patch mail: it has no From: line"
    )
    mail = b"X: y\nFrom: a\nDate: b\nSubject: c\n\ndiff --git "
    with pytest.raises(StackError) as fault:
        format_.parse("a.patch", mail)
    assert str(fault.value) == (
        "patches/a.patch is not a git format-patch mail: no From line first"
    )


def test_step_that_takes_long(monkeypatch, capfd):
    monkeypatch.setattr(progress, "PERIOD_S", 0.2)
    with progress.heartbeat("apply"):
        time.sleep(0.35)
        progress.note("copying")
        time.sleep(0.7)
        progress.step("removing scratch files")
    # Whole seconds, which these are too short for; how many depends on the machine.
    assert list(dict.fromkeys(capfd.readouterr().err.splitlines())) == [
        "  apply: 0 s",
        "  copying",
        "  copying: 0 s",
    ]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_progress_takes_no_signal(name):
    """One that the main thread has put off must wait, whoever else runs."""
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(synthetic.REPO / "scripts")!r})
from patchstack import progress
from patchstack.tree import place
signal.signal(signal.{name}, lambda *_: print("interrupted", flush=True))
with progress.heartbeat("x"):
    with place.signals_blocked():
        os.kill(os.getpid(), signal.{name})
        print("written", flush=True)
"""
    out = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert out == "written\ninterrupted\n"


def test_long_conflict_is_cut():
    lines = [str(at) for at in range(100)]
    shown = carry._shortened(lines)
    assert shown[30] == "... 40 more lines ..."
    assert shown[:30] + shown[31:] == lines[:30] + lines[70:]


def test_faults_of_an_installation(stacked, monkeypatch, capfd):
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    loaded = stack.load(stacked.repo)
    facts = Facts(
        python="python",
        python_version="3.11",
        version=None,
        versions={"torch": None},
        torch="2.0",
        missing=[],
        wrong_versions=[WrongVersion("a", "1", "a>=2")],
        package=None,
        import_error=None,
        modules={},
        gpus=[],
        gpu_error="no driver",
        driver=True,
        decode="vllm does not import",
        identity="unknown",
    )
    monkeypatch.setattr(progress, "PERIOD_S", 0)
    assert doctor.faults(loaded, facts)[1:] == [
        "a 1 is installed, vllm needs a>=2: pip install 'a>=2'",
        "there is a GPU, but torch 2.0 does not see it: install the CUDA build of "
        "torch and a driver for it (no driver)",
    ]
    assert capfd.readouterr().err == "  checking compiled files: 1 of 1\n"
    assert doctor.words(loaded, facts) == [
        f"stack    vLLM 9.9.0, stack {loaded.digest[:12]}",
        "reports  unknown",
        "python   python (3.11)",
        "vllm     not installed",
        "with     none of the packages it builds on",
        "GPU      none that torch sees",
        "decode   vllm does not import",
    ]
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert doctor.words(loaded, facts)[1] == (
        "reports  unknown, in the log alone: VLLM_USE_RUST_FRONTEND takes vLLM's Rust "
        "front end"
    )


def test_words_of_a_rebase(stacked, tmp_path):
    newer = synthetic.make_upstream(tmp_path, "9.10.0")
    stacked.offer(newer)
    done = stacked.run("rebase", "9.10.0")
    assert done.returncode == 0
    assert synthetic.said(done.stderr) == [
        f"  unpacking {newer.sdist.name}",
        "  recording vLLM 9.10.0",
        "  trying 2 patches on vLLM 9.10.0",
        "  comparing what our code takes from upstream",
    ]
    assert json.loads(stacked.ok("rebase", "--abort", "--json")) == {"state": "aborted"}


def test_what_to_do_next(stacked, tmp_path):
    layers = synthetic.RELEASE["vllm/layers.py"]
    moved = {"vllm/layers.py": None, "vllm/model/layers.py": layers}
    moved["pyproject.toml"] = None
    stacked.offer(synthetic.make_upstream(tmp_path, "9.10.0", moved))
    done = stacked.run("rebase", "9.10.0")
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == (
        "next: leave out what has no file (--drop TOPIC|PATH), then scripts/rebase.sh "
        "--continue; or --abort"
    )
    assert "- `pyproject.toml`: upstream has it no more\n" in done.stdout
    done = stacked.run("rebase", "--continue", "--drop", "wide-layers")
    assert stacked.ok("rebase", "--accept").splitlines()[-1] == (
        "next: mend what drifted, scripts/test.sh, commit"
    )


REPORT = Report(
    "1",
    "2",
    State.CONFLICT,
    [
        PatchRow(
            f"{name}.patch",
            "Do | this",
            state,
            outcome,
            "a test",
            "1: a = 1: b" if outcome == Outcome.REANCHORED else None,
            [FileRow("a.py", outcome, "", [])],
        )
        for name, state, outcome in (
            ("a", State.CLEAN, Outcome.CLEAN),
            ("b", State.DRIFT, Outcome.REANCHORED),
            ("c", State.RESOLVED, Outcome.RESOLVED),
            ("d", State.OBSOLETE, Outcome.OBSOLETE),
            ("e", State.DROPPED, Outcome.DROPPED),
            ("f", State.DRIFT, Outcome.CLEAN),
        )
    ],
    [OwnFile("b.py", OwnState.GONE)],
    Requirements(["a>2"], ["a"]),
    [Finding(Level.BREAKING, "s", "gone", ("b",))],
)
PAGE = """\
## vLLM 1 -> 2: conflict

Patches: 1 clean, 1 resolved, 1 dropped, 1 obsolete, 2 drift

- `a.patch`: clean: Do | this
- `b.patch`: drift (re-anchored): Do | this
- `c.patch`: resolved: Do | this
- `d.patch`: obsolete: Do | this
- `e.patch`: dropped: Do | this
- `f.patch`: drift (clean): Do | this

### Resolved by hand: review these

`c.patch`
- a.py: resolved
- drop it if this passes on vLLM 2 alone: a test

### Re-anchored only: the edit is the same

`b.patch`
- a.py: re-anchored
- drop it if this passes on vLLM 2 alone: a test

```diff
1: a = 1: b
```

### Obsolete: upstream has the edit

`d.patch`
- a.py: obsolete
- --accept takes the patch off the series

### Left out

`e.patch`
- a.py: dropped

### Clean, with drift

`f.patch`
- a.py: clean
- drop it if this passes on vLLM 2 alone: a test

### Own files in the place of upstream's

- `b.py`: upstream has it no more

### Requirements of the release: 2 requirements changed

- new: `a>2`
- gone: `a`

### Drift: 1 breaking

- `s`: gone
  - used by `b`
"""


def test_page_of_a_report():
    assert report.markdown(REPORT) == PAGE


# Strings with a blank that are no sentences: for git, regular expressions, types.
NOT_SAID = re.compile(
    r"\\[ndstwu]|^\^|\.\*\$|^\* -text|^\{\} <|\| None$|^Thu, 01 Jan|MIME-Version|"
    r"^\nimport |^from pip|^none\|filed|^scripts/refresh.sh \{topic\}|"
    r"^\n?(---|\+\+\+|diff --git) [ab]/|it = \[|, whole$|^# (The|Up)|-diff$|html;q|"
    r"^<<<<<<<|<patchstack@|^result as"
)
NOT_FOR_HERE = ("help", "description", "epilog", "metavar")


def sentences(path):
    """Line and text of each string that holds a blank: messages, split at values.

    Docstrings and `--help` aside.
    """
    tree = ast.parse(path.read_text())
    aside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            aside.add(node.value)
        named = isinstance(node, ast.keyword) and node.arg in NOT_FOR_HERE
        parser = isinstance(node, ast.Assign) and any(
            isinstance(it, ast.Attribute) and it.attr in NOT_FOR_HERE
            for it in node.targets
        )
        group = isinstance(node, ast.Call) and (
            getattr(node.func, "attr", "") == "add_argument_group"
        )
        if named or parser or group:
            aside.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.strip()
            if node not in aside and " " in text and not NOT_SAID.search(node.value):
                yield node.lineno, text


def test_every_sentence_is_in_a_test():
    """A text that changes, or a new one, needs a test that has it word for word."""
    known = [
        text
        for path in synthetic.REPO.glob("tests/**/*.py")
        for _, text in sentences(path)
    ]
    known.append((synthetic.REPO / "vllm" / ".gitignore").read_text())
    known = "\0".join(known)
    missing = [
        f"{path.name}:{line}: {text!r}"
        for path in sorted((synthetic.REPO / "scripts" / "patchstack").rglob("*.py"))
        for line, text in sentences(path)
        if text not in known
    ]
    assert missing == []
