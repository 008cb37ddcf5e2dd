"""`rebase`: every state on purpose, and nothing written before it is accepted."""

import functools
import http.server
import json
import shutil
import subprocess
import threading
import urllib.parse

import pytest
import synthetic
from patchstack.rebase import needs

ENGINE = synthetic.ENGINE
MOVED = "# Engines.\n\nSPEED = 1\n\n\n" + ENGINE
"""The engine with its functions further down."""
CLASHING = ENGINE.replace(
    "    return step\n\n\ndef stop", "    return -step\n\n\ndef stop"
)
"""The engine with another edit of the line that a patch edits."""
EDITED = ENGINE.replace(
    "    return step\n\n\ndef stop", "    return step + 1\n\n\ndef stop"
)
"""The engine as the patch makes it."""
TAKEN = {"vllm/layers.py": synthetic.RELEASE["vllm/layers.py"].replace("= 8", "= 16")}
LAYERS_MOVED = {
    "vllm/layers.py": None,
    "vllm/model/layers.py": synthetic.RELEASE["vllm/layers.py"],
}


@pytest.fixture
def release(tmp_path, stacked):
    """Makes a newer release and puts it into the checkout's cache."""

    def make(changes=None, version="9.10.0"):
        folder = tmp_path / f"release-{version}"
        folder.mkdir()
        upstream = synthetic.make_upstream(folder, version, changes)
        stacked.offer(upstream)
        return upstream

    return make


def rebase(checkout, *args, code):
    done = checkout.run("rebase", *args)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout


def report(checkout, *args, code):
    return json.loads(rebase(checkout, *args, "--json", code=code))


def states(found):
    return {row["name"]: row["state"] for row in found["patches"]}


def accept(checkout, upstream, rules=True):
    """Accept; then the stack must hold together on the new release."""
    out = checkout.ok("rebase", "--accept")
    assert not (checkout.repo / ".rebase").exists()
    checkout.commit()
    checkout.ok("apply", "--check")
    if rules:
        checkout.ok("status", "--check")
    assert checkout.ok("refresh") == "nothing to do\n"
    version = f"{upstream.version}+ours.1"
    assert checkout.text("vllm/_version.py") == f'__version__ = "{version}"\n'
    content = checkout.content()
    checkout.ok("apply", "--unapply")
    checkout.ok("apply")
    assert checkout.content() == content
    return out


def test_clean(stacked, release):
    newer = release({"README.md": "A better engine.\n"})
    before = stacked.snapshot()
    patches = {name: stacked.patch(name).read_bytes() for name in NAMES}
    assert rebase(stacked, "9.10.0", code=0) == CLEAN_REPORT
    assert stacked.snapshot() == before
    accept(stacked, newer)
    assert {name: stacked.patch(name).read_bytes() for name in NAMES} == patches
    assert stacked.text("README.md") == "A better engine.\n"


NAMES = ("step-by-two.patch", "wide-layers.patch")
CLEAN_REPORT = """\
## vLLM 9.9.0 -> 9.10.0: clean

Patches: 2 clean

- `step-by-two.patch`: clean: Step by two
- `wide-layers.patch`: clean: Widen the layers

### Own files in the place of upstream's

- `.gitignore`: upstream's is as it was
- `pyproject.toml`: upstream's is as it was
- `vllm/_version.py`: ours is written by --accept

next: scripts/rebase.sh --accept, or --abort
"""


def test_reanchored(stacked, release, tmp_path):
    newer = release({"vllm/engine.py": MOVED})
    before = stacked.snapshot()
    found = report(stacked, "9.10.0", code=0)
    assert states(found) == dict(zip(NAMES, ("re-anchored", "clean"), strict=True))
    assert found["state"] == "re-anchored"
    assert stacked.snapshot() == before
    accept(stacked, newer)
    # It went into the function it was made for, not into the one with that text.
    edited = "    return step + 1\n\n\ndef stop"
    assert stacked.text("vllm/engine.py") == MOVED.replace(
        "    return step\n\n\ndef stop", edited
    )
    assert "@@ -6,7 +6,7 @@" in stacked.patch(NAMES[0]).read_text()


def test_conflict_is_shown_and_settled(stacked, release, tmp_path):
    newer = release({"vllm/engine.py": CLASHING})
    before = stacked.snapshot()
    out = rebase(stacked, "9.10.0", code=3)
    assert CONFLICT_REPORT in out
    work = stacked.repo / ".rebase" / "files" / "vllm" / "engine.py"
    text = work.read_text()
    assert text.count("<<<<<<< vLLM 9.10.0\n") == 1
    assert stacked.fails("rebase", "--accept") == (
        "in conflict: step-by-two.patch: settle the files in .rebase/files/, then "
        "scripts/rebase.sh --continue; or --abort"
    )
    # What is not settled stays as the user left it.
    work.write_text("# thinking\n" + text)
    rebase(stacked, "--continue", code=3)
    assert work.read_text() == "# thinking\n" + text
    assert stacked.fails("rebase", "9.10.0") == (
        "a rebase onto vLLM 9.10.0 is under way: --continue, --accept or --abort it "
        "first"
    )
    settled = CLASHING.replace("return -step", "return -step - 1")
    work.write_text(settled)
    page = tmp_path / "report.md"
    found = report(stacked, "--continue", "--markdown", str(page), code=4)
    assert found["patches"][0]["outcome"] == "resolved"
    assert not work.exists()
    assert stacked.snapshot() == before
    accept(stacked, newer)
    assert stacked.text("vllm/engine.py") == settled
    assert "### Resolved by hand: review these\n\n`step-by-two.patch`" in (
        page.read_text()
    )


CONFLICT_REPORT = """\
- `step-by-two.patch`: conflict: Step by two
- `wide-layers.patch`: clean: Widen the layers

### Conflicts

`step-by-two.patch`
- vllm/engine.py: conflict
- drop it if this passes on vLLM 9.10.0 alone: tests/x.py::test_y

```diff
<<<<<<< vLLM 9.10.0
    return -step
||||||| vLLM 9.9.0, and what the patch changes:
@@ -1 +1 @@
-    return step
+    return step + 1
>>>>>>> patches/step-by-two.patch
```
"""


def test_a_deleted_conflict_leaves_the_edit_out(stacked, release):
    newer = release({"vllm/engine.py": CLASHING})
    rebase(stacked, "9.10.0", code=3)
    (stacked.repo / ".rebase" / "files" / "vllm" / "engine.py").unlink()
    found = report(stacked, "--continue", code=0)
    assert states(found) == dict(zip(NAMES, ("dropped", "clean"), strict=True))
    assert "patches/step-by-two.patch: taken off the series" in (accept(stacked, newer))
    assert not stacked.patch(NAMES[0]).exists()
    assert stacked.patch("series").read_text() == f"{NAMES[1]}\n"
    assert "engine.py" not in (stacked.repo / "upstream.toml").read_text()


def test_a_file_that_upstream_has_moved(stacked, release):
    newer = release(LAYERS_MOVED)
    found = report(stacked, "9.10.0", code=3)
    assert found["patches"][1]["files"] == [
        {
            "path": "vllm/layers.py",
            "outcome": "conflict",
            "note": "vLLM 9.10.0 has no such file; "
            "vllm/model/layers.py is much like it",
            "hunks": [],
        }
    ]
    assert stacked.fails("rebase", "--continue", "--drop", "layers") == (
        "--drop layers: neither a patch's topic nor a file one edits"
    )
    found = report(stacked, "--continue", "--drop", "wide-layers", code=0)
    assert states(found) == dict(zip(NAMES, ("clean", "dropped"), strict=True))
    accept(stacked, newer)
    assert not stacked.patch(NAMES[1]).exists()


def test_obsolete(stacked, release):
    newer = release(TAKEN)
    out = rebase(stacked, "9.10.0", code=5)
    assert "`wide-layers.patch`: obsolete: Widen the layers\n" in out
    assert "- --accept takes the patch off the series\n" in out
    accept(stacked, newer)
    assert stacked.patch("series").read_text() == f"{NAMES[0]}\n"
    assert stacked.text("vllm/layers.py") == TAKEN["vllm/layers.py"]


def test_obsolete_where_upstream_has_moved_it_too(stacked, release):
    release(
        {"vllm/engine.py": EDITED.replace(ENGINE[:10], "SPEED = 1\n\n\ndef start(")}
    )
    found = report(stacked, "9.10.0", code=5)
    assert states(found)[NAMES[0]] == "obsolete"


def test_drift_that_no_hunk_touches(stacked, release):
    own = stacked.tree / "vllm" / "ours.py"
    own.write_text("from vllm.engine import wait\n\n\ndef pause():\n    wait(1)\n")
    stacked.commit()
    newer = release(
        {"vllm/engine.py": ENGINE.replace("wait(seconds)", "rest(seconds)")}
    )
    found = report(stacked, "9.10.0", code=4)
    assert found["state"] == "drift"
    assert set(states(found).values()) == {"re-anchored", "clean"}
    assert found["drift"] == [
        {
            "level": "breaking",
            "symbol": "vllm.engine.wait",
            "change": "gone; rest has its body",
            "used_by": ["vllm/ours.py: pause", "vllm/ours.py: top level"],
        }
    ]
    accept(stacked, newer)


def test_drift_around_the_lines_of_a_patch(stacked, release):
    text = ENGINE.replace("step = step * 2", "step = step * 3", 1)
    release({"vllm/engine.py": "# Engines.\n" + text})
    out = rebase(stacked, "9.10.0", code=4)
    assert "`step-by-two.patch`: drift (re-anchored): Step by two\n" in out
    assert (
        "### Drift: 1 changed\n\n"
        "- `vllm.engine.start`: its body around our lines changed\n"
        "  - used by `patches/step-by-two.patch: start`\n"
    ) in out


def test_what_gives_way_has_changed(stacked, release):
    newer = release(
        {
            "pyproject.toml": "[build-system]\nrequires = ['ninja']\nmore = 1\n",
            "setup.py": None,
            "PKG-INFO": synthetic.RELEASE["PKG-INFO"].replace(
                "\n\nText", "\nRequires-Dist: numpy>2\n\nText"
            ),
        }
    )
    out = rebase(stacked, "9.10.0", code=4)
    assert (
        "- `pyproject.toml`: upstream's has changed, +2 -1 lines: see what ours needs "
        "of it\n"
    ) in out
    assert "release: 1 requirement changed\n\n- new: `numpy>2`\n" in out
    project = stacked.text("pyproject.toml")
    done = accept(stacked, newer)
    assert "setup.py" not in (stacked.repo / "upstream.toml").read_text()
    assert (
        "vllm/pyproject.toml: requirements: lock them (ci/requirements/lock.sh)\n"
    ) in done
    assert stacked.text("pyproject.toml") == project.replace(
        "\n]\n\n[project.opt", '\n    "numpy>2",\n]\n\n[project.opt'
    )


def test_an_accept_that_cannot_rewrite_the_requirements(stacked, release):
    needs = synthetic.RELEASE["PKG-INFO"].replace(
        "\n\nText", "\nRequires-Dist: numpy>2\n\nText"
    )
    release({"PKG-INFO": needs})
    stacked.edit("pyproject.toml", "dependencies = [\n", "dependencies = [ # ours\n")
    stacked.commit()
    rebase(stacked, "9.10.0", code=4)
    before = stacked.snapshot()
    assert stacked.fails("rebase", "--accept") == (
        "the dependencies of vllm/pyproject.toml are not a list with one a line: put "
        "them back into that form (git log -p vllm/pyproject.toml)"
    )
    assert stacked.snapshot() == before


PROJECT = """\
[project]
dependencies = [
    # Ours.
    "cuda-python>=13",
    "numpy",
    'six; python_version > "3.11"',
    "Foo_Bar<2",
]
[tool.x]
"""


@pytest.mark.parametrize(
    ("added", "removed", "expected"),
    [
        (["numpy>2"], ["numpy"], PROJECT.replace('"numpy"', '"numpy>2"')),
        ([], ["numpy", "gone"], PROJECT.replace('    "numpy",\n', "")),
        (["foo-bar<3"], ["Foo_Bar<2"], PROJECT.replace("Foo_Bar<2", "foo-bar<3")),
        (
            ['z; os_name == "x"'],
            ['six; python_version > "3.11"'],
            PROJECT.replace("    'six; python_version > \"3.11\"',\n", "").replace(
                "]\n[tool", "    'z; os_name == \"x\"',\n]\n[tool"
            ),
        ),
    ],
)
def test_requirements_are_carried_over(added, removed, expected):
    assert needs.rewritten(PROJECT, added, removed) == expected


def test_the_budget_of_a_patch_goes_with_it(stacked, release):
    synthetic.budget(stacked, "wide-layers", 60)
    stacked.commit()
    newer = release(TAKEN)
    rebase(stacked, "9.10.0", code=5)
    accept(stacked, newer)
    assert "[[budget]]" not in (stacked.repo / "upstream.toml").read_text()


def test_upstream_comes_to_have_our_file(stacked, release):
    release({"vllm/ours.py": "THEIRS = True\n"})
    out = rebase(stacked, "9.10.0", code=4)
    assert (
        "- `vllm/ours.py`: upstream has a file there now: rename ours before --accept\n"
    ) in out
    before = stacked.snapshot()
    assert stacked.fails("rebase", "--accept") == (
        "vLLM 9.10.0 has a file at the place of own file vllm/vllm/ours.py: --abort, "
        "rename ours, then rebase"
    )
    assert stacked.snapshot() == before


def test_two_patches_in_conflict_over_a_file(stacked, release):
    stacked.edit("vllm/engine.py", "step + 1", "step + 2")
    stacked.ok("refresh", "third", *synthetic.header("Step by three"))
    stacked.commit()
    newer = release({"vllm/engine.py": CLASHING})
    found = report(stacked, "9.10.0", code=3)
    assert [row["state"] for row in found["patches"]] == [
        "conflict",
        "clean",
        "conflict",
    ]
    assert found["patches"][2]["files"][0]["note"] == (
        "tried without step-by-two.patch, which is to be settled first"
    )
    work = stacked.repo / ".rebase" / "files" / "vllm" / "engine.py"
    work.write_text(ENGINE.replace("return step\n", "return step + 1\n", 1))
    found = report(stacked, "--continue", code=4)
    outcomes = [row["outcome"] for row in found["patches"]]
    assert outcomes == ["resolved", "clean", "clean"]
    # A patch on a patch breaks a rule of its own, here as before.
    accept(stacked, newer, rules=False)
    assert "return step + 2\n" in stacked.text("vllm/engine.py")


def test_abort(stacked, release):
    release({"vllm/engine.py": CLASHING})
    before = stacked.snapshot()
    rebase(stacked, "9.10.0", code=3)
    assert stacked.ok("rebase", "--abort") == "the rebase is forgotten\n"
    assert stacked.snapshot() == before
    assert not (stacked.repo / ".rebase").exists()
    for mode in ("--abort", "--continue", "--accept"):
        assert stacked.fails("rebase", mode) == (
            "no rebase is under way: start one with scripts/rebase.sh VERSION"
        )


def test_not_applied(stacked, release):
    newer = release({"vllm/engine.py": MOVED})
    stacked.ok("apply", "--unapply")
    assert report(stacked, "9.10.0", code=0)["state"] == "re-anchored"
    accept(stacked, newer)


def test_refusals(stacked, release, tmp_path):
    newer = release()
    before = stacked.snapshot()
    say = (
        "say what to do: scripts/rebase.sh VERSION, or --continue, --accept or --abort "
        "for the rebase under way"
    )
    assert stacked.fails("rebase") == say
    assert stacked.fails("rebase", "9.10.0", "--accept") == say
    assert stacked.fails("rebase", "foo") == (
        "'foo' is no release: say one, such as 0.33.0, or latest"
    )
    assert stacked.fails("rebase", "9.11.0", "--offline") == (
        f"vllm-9.11.0.tar.gz is not in the cache ({stacked.cache}): run once without "
        "--offline"
    )
    assert stacked.fails("rebase", "9.11.0", "--from", str(newer.sdist)) == (
        f"--from {newer.sdist} is vLLM 9.10.0, not 9.11.0: name that"
    )
    assert stacked.fails("rebase", "--abort", "--from", str(newer.sdist)) == (
        "--from goes with VERSION: it says where the release is"
    )
    assert stacked.snapshot() == before
    assert not (stacked.repo / ".rebase").exists()


def test_the_stack_changes_meanwhile(stacked, release):
    release()
    rebase(stacked, "9.10.0", code=0)
    stacked.ok("refresh", "wide-layers", "--why", "another reason")
    assert stacked.fails("rebase", "--accept") == (
        "the stack has changed since the rebase began: --abort it, then "
        "scripts/rebase.sh 9.10.0"
    )


def test_accept_keeps_local_edits(stacked, release):
    release()
    stacked.edit("vllm/layers.py", "16", "24")
    rebase(stacked, "9.10.0", code=0)
    before = stacked.snapshot()
    assert "vllm/ has local edits (changed: vllm/layers.py)" in (
        stacked.fails("rebase", "--accept")
    )
    assert stacked.snapshot() == before


def test_from_a_folder(stacked, release, tmp_path):
    newer = release({"vllm/engine.py": MOVED})
    folder = tmp_path / "source"
    for path, data in newer.files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    found = report(stacked, "9.10.0", "--from", str(folder), code=0)
    assert found["state"] == "re-anchored"
    assert stacked.fails("rebase", "--accept") == (
        "pins need the release's sdist: --abort, then scripts/rebase.sh 9.10.0 (or "
        "--from SDIST)"
    )


@pytest.fixture
def publish(stacked, tmp_path):
    """Puts archives on a package index of our own, with or without their hashes."""
    page = tmp_path / "simple" / "vllm" / "index.html"
    page.parent.mkdir(parents=True)
    handler = functools.partial(QuietHandler, directory=tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stacked.env["PIP_INDEX_URL"] = f"http://127.0.0.1:{server.server_port}/simple"

    def add(*archives, hashed=True):
        lines = ""
        for archive in archives:
            digest = synthetic.sha256(archive.read_bytes())
            link = f"/{urllib.parse.quote(str(archive.relative_to(tmp_path)))}"
            link += f"#sha256={digest}" if hashed else ""
            lines += f'<a href="{link}">{archive.name}</a>\n'
        page.write_text(lines + (page.read_text() if page.exists() else ""))

    old = tmp_path / stacked.upstream.sdist.name
    shutil.copy2(stacked.upstream.sdist, old)
    add(old)
    yield add
    server.shutdown()
    server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        """Nothing: the tests' output is for results."""


@pytest.mark.parametrize("hashed", [True, False])
def test_the_newest_release_is_found_and_pinned(stacked, publish, tmp_path, hashed):
    assert rebase(stacked, "latest", code=0) == (
        "vLLM 9.9.0, which the stack is for, is the newest release\n"
    )
    newer = synthetic.make_upstream(tmp_path, "9.10.0", {"vllm/engine.py": MOVED})
    publish(newer.sdist, newer.wheel, hashed=hashed)
    found = report(stacked, "latest", code=0)
    assert (found["to"], found["state"]) == ("9.10.0", "re-anchored")
    accept(stacked, newer)
    pins = (stacked.repo / "upstream.toml").read_text()
    for archive in (newer.sdist, newer.wheel):
        digest = synthetic.sha256(archive.read_bytes())
        assert f'{{ file = "{archive.name}", sha256 = "{digest}" }}' in pins


def test_a_release_that_is_not_on_the_index(stacked, publish):
    assert stacked.fails("rebase", "9.11.0") == (
        "the package index has no vllm-9.11.0.tar.gz: check that there is a vLLM "
        "9.11.0, and pip's index settings"
    )


def test_a_release_without_our_wheel(stacked, publish, tmp_path):
    publish(synthetic.make_upstream(tmp_path, "9.10.0").sdist)
    before = stacked.snapshot()
    rebase(stacked, "9.10.0", code=0)
    machine = synthetic.MACHINE
    assert stacked.fails("rebase", "--accept") == (
        f"the package index has no vllm-9.10.0-*_{machine}.whl: check that there is a "
        "vLLM 9.10.0, and pip's index settings"
    )
    assert stacked.snapshot() == before


@pytest.mark.parametrize("event", ["kill", "SIGINT", "full"])
@pytest.mark.parametrize(
    "point",
    ["before:tree.make.apply", "after:tree.make.apply", "after:stack.rewrite.keep"],
)
def test_an_interrupted_accept_is_undone(stacked, release, event, point):
    release({"vllm/engine.py": MOVED})
    rebase(stacked, "9.10.0", code=0)
    before = stack_of(stacked)
    done = subprocess.run(
        stacked.inject(f"{event}:{point}", "rebase", "--accept"),
        env=stacked.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    # Whatever runs next puts the stack back.
    stacked.ok("apply")
    assert stack_of(stacked) == before
    stacked.ok("rebase", "--abort")
    stacked.ok("status", "--check")


def stack_of(checkout):
    names = ("patches/", "upstream.toml", "vllm/vllm/_version.py")
    return {
        name: data
        for name, data in checkout.snapshot().items()
        if name.startswith(names)
    }


@pytest.mark.parametrize(
    "point", ["after:rebase.work._record_release", "before:rebase.trial.run"]
)
def test_a_killed_start_is_begun_again(stacked, release, point):
    release({"vllm/engine.py": MOVED})
    before = stacked.snapshot()
    done = subprocess.run(
        stacked.inject(f"kill:{point}", "rebase", "9.10.0"),
        env=stacked.environment(),
        capture_output=True,
    )
    assert done.returncode == -9
    assert stacked.snapshot() == before
    assert report(stacked, "9.10.0", code=0)["state"] == "re-anchored"
    assert report(stacked, "9.10.0", code=0)["state"] == "re-anchored"


def test_hostile_git_configuration(stacked, release):
    newer = release({"vllm/engine.py": CLASHING, **TAKEN})
    expected = rebase(stacked, "9.10.0", code=3)
    stacked.ok("rebase", "--abort")
    stacked.surround_with_hostile_git()
    assert rebase(stacked, "9.10.0", code=3) == expected
    work = stacked.repo / ".rebase" / "files" / "vllm" / "engine.py"
    settled = CLASHING.replace("return -step", "return -step - 1")
    work.write_text(settled)
    rebase(stacked, "--continue", code=4)
    stacked.ok("rebase", "--accept")
    stacked.ok("apply", "--check")
    assert stacked.text("vllm/engine.py") == settled
    assert stacked.text("vllm/layers.py") == newer.files["vllm/layers.py"].decode()


def test_upstream_has_taken_half_of_a_patch(stacked, release):
    stacked.edit("vllm/engine.py", "return seconds", "return seconds + 1")
    stacked.edit("README.md", "An engine.", "An engine of ours.")
    stacked.ok("refresh", "step-by-two")
    stacked.commit()
    newer = release({"README.md": "An engine of ours.\n"})
    found = report(stacked, "9.10.0", code=0)
    row = found["patches"][0]
    assert row["outcome"] == "re-anchored"
    outcomes = {file["path"]: file["outcome"] for file in row["files"]}
    assert outcomes == {"README.md": "obsolete", "vllm/engine.py": "clean"}
    accept(stacked, newer)
    assert "README.md" not in stacked.patch(NAMES[0]).read_text()


def test_a_stack_without_patches(bare, tmp_path):
    newer = synthetic.make_upstream(tmp_path, "9.10.0")
    bare.offer(newer)
    bare.patch("series").unlink()
    assert report(bare, "9.10.0", code=0)["state"] == "clean"
    accept(bare, newer)


def test_reports_are_the_same_each_time(stacked, release, tmp_path):
    release({"vllm/engine.py": CLASHING})
    first = rebase(stacked, "9.10.0", code=3)
    assert rebase(stacked, "--continue", code=3) == first
