"""Patch files, the list of own files and `upstream.toml`: pure functions."""

import os
import sys
from pathlib import Path

import pytest
from patchstack import base, fetch, own, patches
from patchstack.base import Pin
from patchstack.patches import PatchFormatError

NAME = "0001-topic.patch"
GOOD = b"""\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: Ada <ada@example.org>
Date: Sun, 29 Nov 2026 18:00:00 +0000
Subject: [PATCH] Ask the hook

More about it.

Why: the reason
 goes on
Upstream-status: filed somewhere
Drop-when: tests/x.py::test_y
Touches: vllm/a.py
 vllm/b c.py
Tests: tests/x.py

diff --git a/vllm/a.py b/vllm/a.py
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222 100644
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,4 +1,5 @@
 one
 two
 three
+hook
 four
diff --git a/vllm/b c.py b/vllm/b c.py
index 3333333333333333333333333333333333333333..4444444444444444444444444444444444444444 100755
--- a/vllm/b c.py\t
+++ b/vllm/b c.py\t
@@ -1 +1 @@
--- removed line that looks like a header
+++ added line that looks like one
\\ No newline at end of file
"""  # noqa: E501


def edited(old: bytes, new: bytes) -> bytes:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def faults(data: bytes, budget: int = 40) -> list[str]:
    prefix = f"patches/{NAME}: "
    found = patches.lint(patches.parse(NAME, data), data, budget)
    assert all(fault.startswith(prefix) for fault in found)
    return [fault.removeprefix(prefix) for fault in found]


def test_parse_and_write_are_inverse():
    patch = patches.parse(NAME, GOOD)
    assert patch.to_bytes() == GOOD
    assert faults(GOOD) == []
    assert (patch.number, patch.topic) == (1, "topic")
    assert patch.author == "Ada <ada@example.org>"
    assert patch.subject == "Ask the hook"
    assert patch.body == "More about it."
    assert patch.headers["Why"] == "the reason\ngoes on"
    assert patch.touches == ["vllm/a.py", "vllm/b c.py"]
    assert patch.quoted == 5


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (b"Why: the reason\n goes on\n", b"", "no Why: line"),
        (b"Why: the reason\n goes on\n", b"Why:\n", "no Why: line"),
        (b"Tests: tests/x.py\n", b"", "no Tests: line"),
        (b"Drop-when: tests/x.py::test_y\n", b"", "no Drop-when: line"),
        (
            b"Upstream-status: filed somewhere",
            b"Upstream-status: soon",
            "Upstream-status is 'soon': say none, filed WHERE or merged in VERSION",
        ),
        (
            b"\n vllm/b c.py\n",
            b"\n",
            "Touches lists other files than the diff: vllm/a.py vllm/b c.py",
        ),
        (
            b"Ask the hook",
            b"ask the hook",
            "the subject must start with a capital and fit 72 columns",
        ),
        (
            b"Ask the hook",
            b"Ask " + b"x" * 70,
            "the subject must start with a capital and fit 72 columns",
        ),
        (b"Ask the hook", b"Ask the hook.", "the subject ends with a full stop"),
        (
            b"@@ -1,4 +1,5 @@\n one\n",
            b"@@ -1,5 +1,6 @@\n zero\n one\n",
            "a hunk has more than 3 lines of context",
        ),
        (
            b"+1,5 @@\n",
            b"+1,5 @@ def upstream():\n",
            "a hunk header quotes upstream behind @@: run scripts/refresh.sh",
        ),
        (
            b"\n\ndiff",
            b"\n---\n a | 1 +\n\ndiff",
            "not in the form that scripts/refresh.sh writes: run it",
        ),
        (
            b"From 0000",
            b"From 1234",
            "not in the form that scripts/refresh.sh writes: run it",
        ),
    ],
)
def test_lint(old, new, fault):
    assert faults(edited(old, new)) == [fault]


def test_budget():
    assert faults(GOOD, budget=5) == []
    assert faults(GOOD, budget=4) == [
        "quotes 5 upstream lines, its budget is 4: move logic into an own file, or "
        "state a [[budget]] in upstream.toml"
    ]


def test_context_between_two_changes_is_shared():
    def widest(middle: int) -> int:
        lines = b"+a\n" + b" x\n" * middle + b"+b\n"
        hunk = b"@@ -1,%d +1,%d @@\n" % (middle, middle + 2) + lines
        data = GOOD[: GOOD.index(b"@@")] + hunk
        return patches.parse(NAME, data).files[0].hunks[0].widest_context()

    assert widest(6) == 3
    assert widest(7) == 4


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "patches/0001-topic.patch has no diff"),
        (
            GOOD.replace(b"\n", b"\r\n"),
            "patches/0001-topic.patch has CRLF line ends, so git converted it on "
            "checkout: check it out again with core.autocrlf=false",
        ),
        (
            edited(b"Date: Sun, 29 Nov 2026 18:00:00 +0000\n", b""),
            "patches/0001-topic.patch is not a git format-patch mail: it has no Date: "
            "line",
        ),
        (
            edited(b"index 1111", b"new file mode 100644\nindex 1111"),
            "patches/0001-topic.patch, line 2 of the diff: a patch only edits files "
            "that are there, not 'new file mode 100644': put new files into the tree "
            "as own files, list removed ones in upstream.toml",
        ),
        (
            edited(b"index 1111", b"index "),
            "patches/0001-topic.patch, line 2 of the diff: the index line needs full "
            "blob ids and a file mode (--full-index)",
        ),
        (
            edited(b"a/vllm/a.py b/vllm/a.py", b"a/vllm/a.py b/vllm/z.py"),
            "patches/0001-topic.patch, line 2 of the diff: a patch neither renames a "
            "file nor quotes its name",
        ),
        (
            edited(b"+++ b/vllm/a.py", b"+++ b/vllm/z.py"),
            "patches/0001-topic.patch, line 5 of the diff: the +++ line names another "
            "file",
        ),
        (
            edited(b"-1,4 +1,5", b"-1,6 +1,7"),
            "patches/0001-topic.patch, line 5 of the diff: the hunk is shorter or "
            "longer than its @@ line says",
        ),
        (
            edited(b"-1,4 +1,5", b"-1,3 +1,4"),
            "patches/0001-topic.patch, line 10 of the diff: expected 'diff --git a/', "
            "found ' four'",
        ),
        (
            GOOD + b"-- \n2.39.5\n\n",
            "patches/0001-topic.patch, line 19 of the diff: expected 'diff --git a/', "
            "found '-- '",
        ),
        (
            GOOD[: GOOD.index(b"@@")],
            "patches/0001-topic.patch, line 5 of the diff: no hunk",
        ),
        (
            edited(b"Ada", b"\xff"),
            "patches/0001-topic.patch: the message is not UTF-8",
        ),
    ],
)
def test_what_is_no_patch(data, error):
    with pytest.raises(PatchFormatError) as caught:
        patches.parse(NAME, data)
    assert str(caught.value) == error


@pytest.mark.parametrize(
    "name", ["1-topic.patch", "0001-Topic.patch", "0001-a_b.patch"]
)
def test_names(name):
    with pytest.raises(PatchFormatError, match=r"name it NNNN-topic\.patch"):
        patches.split_name(name)


def test_own_list():
    paths = [".gitignore", "a.py", "vllm/models/x/b c.py", "vllm/ours.py"]
    text = own.render(paths)
    assert own.parse(text) == sorted(paths)
    assert text.splitlines()[2:] == [
        "/*",
        "!/.gitignore",
        "!/a.py",
        "!/vllm/",
        "/vllm/*",
        "!/vllm/models/",
        "/vllm/models/*",
        "!/vllm/models/x/",
        "/vllm/models/x/*",
        "!/vllm/models/x/b c.py",
        "!/vllm/ours.py",
    ]


PINS = """\
[base]
version = "1"

# Written by the tool.
[touches]
"old.py" = "1"

# A comment.
[[replaces]]
path = "x.py"
sha256 = "2"
why = "first"

# Another.
[[replaces]]
path = "y.py"
sha256 = "3"
why = "second"
"""


def test_pins_are_rewritten_in_place():
    text = base.with_touches(PINS, {"b.py": "5", 'a"\\.py': "4"})
    touches = '[touches]\n"a\\"\\\\.py" = "4"\n"b.py" = "5"\n'
    assert text == PINS.replace('[touches]\n"old.py" = "1"\n', touches)
    assert base.with_touches(text, {"old.py": "1"}) == PINS
    added = base.with_touches('[base]\nversion = "1"\n', {"a": "b"})
    assert added == '[base]\nversion = "1"\n\n[touches]\n"a" = "b"\n'


def test_replaced_pins_come_and_go():
    more = base.with_replaced(PINS, Pin("z.py", "9", "third"))
    assert more == PINS + (
        '\n[[replaces]]\npath = "z.py"\nsha256 = "9"\nwhy = "third"\n'
    )
    assert base.without_pin(more, "z.py") == PINS
    less = base.without_pin(PINS, "x.py")
    assert "x.py" not in less and "y.py" in less and "first" not in less
    assert "# Another." in less


def test_local_wheels_of_pip_do_not_hide_the_package_index(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    sdist = base.Archive("vllm-1.0.tar.gz", "0" * 64)
    # Of the interpreter that has pip, not of an environment without.
    python = Path(sys.base_prefix, "bin", "python3")
    command = fetch.selection(python, sdist, "1.0")
    assert command[command.index("--find-link") + 1] == str(tmp_path)
    assert "--index-url" in command
