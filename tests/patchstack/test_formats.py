"""Patch files, the list of own files and `upstream.toml`: pure functions."""

import pytest
from patchstack.errors import StackError
from patchstack.stack import base, own, with_series
from patchstack.stack import patch as format_
from patchstack.stack.base import Budget, Pin
from patchstack.stack.patch import PatchFormatError

NAME = "topic.patch"
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
    found = format_.lint(format_.parse(NAME, data), budget)
    assert all(fault.startswith(prefix) for fault in found)
    return [fault.removeprefix(prefix) for fault in found]


def test_a_patch_is_read():
    patch = format_.parse(NAME, GOOD)
    assert faults(GOOD) == []
    assert patch.topic == "topic"
    assert patch.author == "Ada <ada@example.org>"
    assert patch.subject == "Ask the hook"
    assert patch.body == "More about it."
    assert patch.trailers["Why"] == "the reason\ngoes on"
    assert patch.touches == ["vllm/a.py", "vllm/b c.py"]
    assert patch.quoted == 5
    assert patch.files[0].added == {4}
    assert patch.message == format_.message(patch.subject, patch.body, patch.trailers)


def test_headers_that_git_folds_or_encodes():
    data = edited(b"From: Ada <", b"From: =?UTF-8?q?Zo=C3=AB?=\n <")
    data = data.replace(b"Ask the hook", "Ask the\n höok".encode())
    patch = format_.parse(NAME, data)
    assert patch.author == "Zoë <ada@example.org>"
    assert patch.subject == "Ask the höok"


def test_trailers_of_others_stay_before_ours():
    trailers = {"Tests": "t", "Signed-off-by": "Ada", "Why": "a\nb"}
    text = format_.message("Subject", "", trailers)
    assert text == "Subject\n\nSigned-off-by: Ada\nWhy: a\n b\nTests: t\n"


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


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "patches/topic.patch has no diff"),
        (
            GOOD.replace(b"\n", b"\r\n"),
            "patches/topic.patch has CRLF line ends, so git converted it on "
            "checkout: check it out again with core.autocrlf=false",
        ),
        (
            edited(b"Date: Sun, 29 Nov 2026 18:00:00 +0000\n", b""),
            "patches/topic.patch is not a git format-patch mail: it has no Date: line",
        ),
        (
            edited(b"index 1111", b"new file mode 100644\nindex 1111"),
            "patches/topic.patch: 'diff --git a/vllm/a.py b/vllm/a.py', 'new file mode "
            "100644' is not the edit of a text that is there: put new files into the "
            "tree as own files, list removed ones in upstream.toml",
        ),
        (
            edited(b"Why: the reason\n", b"<<<<<<< ours\nWhy: the reason\n"),
            "patches/topic.patch has the conflict markers of a merge: settle them (of "
            "two index lines keep either), then scripts/refresh.sh --reseal",
        ),
        (
            edited(b"Ada", b"\xff"),
            "patches/topic.patch: the message is not UTF-8",
        ),
    ],
)
def test_what_is_no_patch(data, error):
    with pytest.raises(PatchFormatError) as caught:
        format_.parse(NAME, data)
    assert str(caught.value) == error


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"index 1111", b"index z111"),
        (b"a/vllm/a.py b/vllm/a.py", b"a/vllm/a.py b/vllm/z.py"),
        (b"+++ b/vllm/a.py", b"+++ b/vllm/z.py"),
        (b"100644\n", b"120000\n"),
        (b"@@ -1,4 +1,5 @@\n", b""),
    ],
)
def test_what_is_no_edit(old, new):
    data = edited(old, new)
    with pytest.raises(PatchFormatError, match="is not the edit of a text that is"):
        format_.parse(NAME, data)


@pytest.mark.parametrize("name", ["-topic.patch", "Topic.patch", "a_b.patch", ".patch"])
def test_names(name):
    with pytest.raises(PatchFormatError, match=r"name it TOPIC\.patch"):
        format_.parse(name, GOOD)


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


BASE = base.Base(
    "1.0",
    base.Archive("vllm-1.0.tar.gz", "0" * 64),
    {"x86_64": base.Archive("vllm-1.0.whl", "1" * 64)},
    (Pin("x.py", "2", 'it is "ours"\n\\ \x7f'), Pin("y.py", "3", "second")),
    (Pin("gone/", "4", "first"),),
    (Budget("topic", 60, "long"),),
)


def test_pins_are_written_as_they_are_read():
    text = base.render(BASE)
    assert base.parse(text) == BASE
    assert base.render(base.parse(text)) == text
    assert text.endswith("""

# Upstream files that must not be in the tree.
[[removes]]
path = "gone/"
sha256 = "4"
why = "first"

# Patches that may quote more than 40 lines of upstream.
[[budget]]
patch = "topic"
lines = 60
why = "long"
""")


def test_a_comment_in_the_pins_is_not_lost():
    text = base.render(BASE)
    fewer = base.Base(**vars(BASE) | {"removes": (), "budgets": ()})
    assert base.rewritten(text, BASE) == text
    assert base.rewritten(text, fewer) == base.render(fewer)
    with pytest.raises(StackError) as caught:
        base.rewritten(f"# Mine.\n{text}", fewer)
    assert str(caught.value) == (
        "upstream.toml has a comment that would be lost ('# Mine.'): move it into the "
        "why of an entry"
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], "# hooks\na  # A\n\nb\n"),
        (["b", "a"], "# hooks\nb\n\na  # A\n"),
        (["b"], "# hooks\n\nb\n"),
        (["b", "a", "c"], "# hooks\nb\n\na  # A\nc\n"),
    ],
)
def test_series_is_rewritten_around_its_comments(names, expected):
    assert with_series("# hooks\na  # A\n\nb\n", names) == expected
