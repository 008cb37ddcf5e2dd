"""`status` and its rules, each broken once."""

import json
import shutil

import pytest
import synthetic


def faults(checkout):
    done = checkout.run("status", "--check", "--json")
    found = json.loads(done.stdout)["faults"]
    assert done.returncode == bool(found)
    return found


def test_words(stacked):
    stacked.edit("vllm/dos.py", "A = 1", "A = 2")
    (stacked.tree / "vllm" / "ours.py").write_text("OURS = 2\n")
    (stacked.tree / "vllm" / "new.py").write_text("NEW = 1\n")
    facts = json.loads(stacked.ok("status", "--json"))
    name = facts["identity"]
    assert name.startswith(facts["stack"][:12] + ".")
    assert name.endswith("+edited")
    assert stacked.ok("status").splitlines() == [
        f"base     vLLM 9.9.0, fork 9.9.0+ours.1, stack {name}",
        f"tree     applied from the sdist for {synthetic.MACHINE}",
        "patches  2",
        "  step-by-two.patch: applied, upstream none, quotes 7 of 40 lines: Step "
        "by two",
        "  wide-layers.patch: applied, upstream none, quotes 4 of 40 lines: Widen "
        "the layers",
        "own      5 files, 3 in place of upstream's",
        "  edited: vllm/ours.py",
        "edit     modified: vllm/vllm/dos.py (scripts/refresh.sh [TOPIC])",
        "edit     added: vllm/vllm/new.py (in no patch and ignored by git: "
        "scripts/refresh.sh --own PATH)",
        "drift    vllm/ has local edits (changed: vllm/dos.py; new: vllm/new.py): keep "
        "them with scripts/refresh.sh TOPIC (new files: --own PATH) or drop them with "
        "--discard-edits",
    ]
    assert facts["edits"]["modified"] == ["vllm/dos.py"]
    assert facts["edits"]["added"] == ["vllm/new.py"]
    assert [row["state"] for row in facts["patches"]] == ["applied", "applied"]


def test_states(bare, stacked):
    assert "tree     not applied" in bare.ok("status")
    patch = stacked.patch("wide-layers.patch")
    patch.write_bytes(patch.read_bytes().replace(b"it is needed", b"wide is better"))
    rows = json.loads(stacked.ok("status", "--json"))["patches"]
    assert [row["state"] for row in rows] == ["applied", "changed since apply"]
    patch.write_bytes(patch.read_bytes().replace(b"-WIDTH = 8", b"-WIDTH = 9"))
    rows = json.loads(stacked.ok("status", "--json"))["patches"]
    assert [row["state"] for row in rows] == ["unknown", "fails"]


def test_all_rules_hold(stacked):
    assert faults(stacked) == []


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def own_upstream_text(it):
    data = it.upstream.files["vllm/engine.py"]
    (it.repo / "scripts" / "copied.py").write_bytes(data)
    it.git("add", "-A")


def own_wheel_file(it):
    data = synthetic.WHEEL_ONLY["vllm/third_party/vendored.py"]
    (it.repo / "copied.py").write_bytes(data)
    it.git("add", "-A")


def add_foreign_file(it):
    it.git("add", "-f", "vllm/README.md")


def add_own_file(it):
    (it.tree / "vllm" / "more.py").write_text("MORE = 1\n")
    it.ok("refresh", "--own", "vllm/vllm/more.py")


def touch_series(it):
    (it.patch("left.patch")).write_text("")


def drop_budget(it):
    synthetic.budget(it, "gone", 60)
    synthetic.budget(it, "wide-layers", 40)


@pytest.mark.parametrize(
    ("breaks", "expected"),
    [
        (
            lambda it: rewrite(it.patch("step-by-two.patch"), "Why: it", "Whyy: it"),
            [
                "vllm/ was made from another stack: run scripts/apply.sh",
                "patches/step-by-two.patch: no Why: line",
            ],
        ),
        (
            touch_series,
            ["patches/left.patch is not in patches/series: add or delete it"],
        ),
        (
            lambda it: rewrite(it.repo / "upstream.toml", "version = ", "version="),
            [
                "upstream.toml is not in the form that the tool writes: git diff shows "
                "how"
            ],
        ),
        (
            lambda it: rewrite(
                it.patch("step-by-two.patch"), " @@\n", " @@ def f():\n"
            ),
            [
                "vllm/ was made from another stack: run scripts/apply.sh",
                "patches/step-by-two.patch: not in the form that git format-patch "
                "writes: scripts/refresh.sh --reseal",
            ],
        ),
        (
            lambda it: rewrite(it.patch("step-by-two.patch"), "+ 1\n", "+ 3\n"),
            [
                "vllm/ was made from another stack: run scripts/apply.sh",
                "patches/step-by-two.patch would change vllm/engine.py in another way "
                "than it was made to (it was edited by hand): scripts/refresh.sh "
                "--reseal, or make the edit again in the tree",
            ],
        ),
        (
            drop_budget,
            [
                "upstream.toml: [[budget]] for 'gone', which is no patch: drop it",
                "upstream.toml: the [[budget]] of 'wide-layers' needs more than 40 "
                "lines and a why",
            ],
        ),
        (
            own_upstream_text,
            ["scripts/copied.py is upstream's vllm/engine.py: take it out of git"],
        ),
        (
            own_wheel_file,
            [
                "copied.py is upstream's vllm/third_party/vendored.py: take it out of "
                "git"
            ],
        ),
        (
            add_foreign_file,
            [
                "vllm/README.md is upstream's README.md: take it out of git",
                "vllm/README.md is in git but no own file: scripts/refresh.sh --own "
                "vllm/README.md, or git rm it",
            ],
        ),
        (
            add_own_file,
            [
                "own file vllm/vllm/more.py is not in git: git add vllm/vllm/more.py",
            ],
        ),
        (
            lambda it: (it.tree / "vllm" / "ours.py").unlink(),
            [
                "own file vllm/vllm/ours.py is missing: restore it from git, or take "
                "it off the list: scripts/refresh.sh --disown vllm/vllm/ours.py"
            ],
        ),
        (
            lambda it: rewrite(it.tree / ".gitignore", "# The", "#  The"),
            ["vllm/.gitignore is not as scripts/refresh.sh --own writes it: use that"],
        ),
        (
            lambda it: rewrite(it.tree / "vllm" / "_version.py", "9.9.0+", "9.8.0+"),
            ["vllm/vllm/_version.py says 9.8.0+ours.1: make it 9.9.0+LOCAL"],
        ),
        (
            lambda it: rewrite(it.tree / "vllm" / "_version.py", "ours", "cpu"),
            [
                "vllm/vllm/_version.py says 9.9.0+cpu.1: vLLM takes 'cpu' for a "
                "CPU build"
            ],
        ),
        (
            lambda it: shutil.rmtree(it.repo / ".tree.git"),
            ["the tree's history is gone or changed: run scripts/apply.sh"],
        ),
    ],
)
def test_broken_rule(stacked, breaks, expected):
    breaks(stacked)
    assert faults(stacked) == expected


def test_patch_that_needs_another(stacked):
    stacked.edit("vllm/layers.py", "WIDTH = 16", "WIDTH = 16\nDEPTH = WIDTH")
    stacked.ok("refresh", "deep", *synthetic.header("Deepen the layers"))
    stacked.commit()
    assert faults(stacked) == [
        "patches/deep.patch does not apply to the base alone: fold it into the "
        "patch it builds on"
    ]


@pytest.mark.parametrize(
    ("breaks", "error"),
    [
        (
            lambda it: (it.repo / "upstream.toml").write_text("[base\n"),
            "upstream.toml is not valid TOML",
        ),
        (
            lambda it: (it.repo / "upstream.toml").write_text("[base]\n"),
            "upstream.toml lacks or misshapes an entry: 'version'",
        ),
        (
            lambda it: it.patch("step-by-two.patch").unlink(),
            "patches/step-by-two.patch is in patches/series but missing",
        ),
        (
            lambda it: it.patch("series").write_text("a.patch\nb.patch\na.patch\n"),
            "patches/series names a.patch twice: take one off",
        ),
        (
            lambda it: (it.tree / ".gitignore").write_text("*.csv\n"),
            "vllm/.gitignore is not the list of own files: restore it from git",
        ),
    ],
)
@pytest.mark.parametrize("command", ["status", "apply"])
def test_unreadable_stack(stacked, command, breaks, error):
    breaks(stacked)
    assert error in stacked.fails(command)
