"""`refresh`: edits into patches and back, byte for byte."""

import json

import pytest
import synthetic

NEW_TOPIC_NEEDS = (
    "the new patch 'third' needs --why --upstream-status --drop-when --tests "
    "--subject, for example: scripts/refresh.sh third "
    '--subject "Compare FlashInfer by release" '
    '--why "a post release switched it off" --upstream-status none --drop-when '
    "tests/x.py::test_y --tests tests/x.py"
)


def assert_round_trip(checkout):
    """Applying the stack makes the tree as it lies; refreshing changes nothing."""
    tree, stack = checkout.content(), stack_files(checkout)
    checkout.ok("apply", "--check")
    assert checkout.ok("refresh") == "nothing to do\n"
    checkout.ok("apply", "--unapply")
    checkout.ok("apply")
    assert checkout.content() == tree
    assert stack_files(checkout) == stack
    assert checkout.ok("refresh") == "nothing to do\n"


def series(checkout):
    return map(checkout.patch, checkout.patch("series").read_text().split())


def stack_files(checkout):
    return {
        name: data
        for name, data in checkout.snapshot().items()
        if name.startswith(("patches/", "upstream.toml"))
    }


def test_new_patch(stacked):
    stacked.edit("vllm/dos.py", "C = 3\r\n", "C = 3\r\nD = 4\r\n")
    out = stacked.ok("refresh", "third", *synthetic.header("Add a fourth letter"))
    assert out == "patches/third.patch: new, 1 file, quotes 3 upstream lines\n"
    assert stacked.patch("series").read_text().splitlines()[-1] == "third.patch"
    text = stacked.patch("third.patch").read_bytes().decode()
    head, _, diff = text.partition("\ndiff --git ")
    date = next(line for line in head.splitlines() if line.startswith("Date: "))
    assert head.splitlines() == [
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001",
        "From: Ada <ada@example.org>",
        date,
        "Subject: [PATCH] Add a fourth letter",
        "",
        "Why: it is needed",
        "Upstream-status: none",
        "Drop-when: tests/x.py::test_y",
        "Tests: tests/x.py",
    ]
    assert diff.endswith("@@ -1,3 +1,4 @@\n A = 1\r\n B = 2\r\n C = 3\r\n+D = 4\r\n")
    assert_round_trip(stacked)


def test_author_is_the_users(stacked):
    stacked.git("config", "user.name", "Zoë Ångström")
    stacked.git("config", "user.email", "zoe@example.org")
    stacked.edit("README.md", "An engine.", "An engine")
    stacked.ok("refresh", "third", *synthetic.header("Drop a full stop"))
    text = stacked.patch("third.patch").read_text()
    assert "From: Zoë Ångström <zoe@example.org>\n" in text
    assert_round_trip(stacked)


def test_new_patch_needs_its_header(stacked):
    stacked.edit("vllm/dos.py", "C = 3", "C = 4")
    before = stacked.snapshot()
    assert stacked.fails("refresh", "third") == NEW_TOPIC_NEEDS
    assert stacked.fails("refresh") == (
        "no patch edits vllm/vllm/dos.py yet: name a topic: scripts/refresh.sh TOPIC"
    )
    header = synthetic.header("Edit dos")
    header[header.index("none")] = "maybe"
    assert stacked.fails("refresh", "third", *header) == (
        "patches/third.patch: Upstream-status is 'maybe': say none, filed WHERE "
        "or merged in VERSION"
    )
    assert stacked.fails("refresh", "No Topic", *synthetic.header("x")) == (
        "patches/No Topic.patch: name it TOPIC.patch (lower case, digits, dashes)"
    )
    assert stacked.snapshot() == before


def test_header_without_edits(stacked):
    assert stacked.fails("refresh", "third", *synthetic.header("Edit")) == (
        "no patch 'third', and no edit in vllm/ to make one"
    )
    out = stacked.ok("refresh", "wide-layers", "--why", "two\nlines", "--subject", "Xs")
    assert out.startswith("patches/wide-layers.patch: rewritten")
    text = stacked.patch("wide-layers.patch").read_text()
    assert "Subject: [PATCH] Xs\n" in text
    assert "Why: two\n lines\n" in text
    assert stacked.fails("refresh", "--why", "x") == (
        "name the TOPIC that the header lines are for"
    )
    assert_round_trip(stacked)


def test_edits_go_to_the_patch_of_their_file(stacked):
    stacked.edit("vllm/layers.py", "16", "24")
    stacked.edit("vllm/engine.py", "step + 1", "step + 2")
    assert stacked.ok("refresh").splitlines() == [
        "patches/step-by-two.patch: rewritten, 1 file, quotes 7 upstream lines",
        "patches/wide-layers.patch: rewritten, 1 file, quotes 4 upstream lines",
    ]
    assert "+WIDTH = 24\n" in stacked.patch("wide-layers.patch").read_text()
    assert_round_trip(stacked)


def test_only_the_named_files(stacked):
    stacked.edit("vllm/layers.py", "16", "24")
    stacked.edit("vllm/engine.py", "step + 1", "step + 2")
    stacked.ok("refresh", "wide-layers", "vllm/vllm/layers.py")
    facts = json.loads(stacked.ok("status", "--json"))
    assert facts["edits"]["modified"] == ["vllm/engine.py"]
    error = stacked.fails("refresh", "wide-layers", "vllm/vllm/layers.py")
    assert error == "vllm/vllm/layers.py has no edit: nothing was changed"
    stacked.ok("refresh")
    assert_round_trip(stacked)


def second_engine_patch(checkout):
    checkout.edit("vllm/engine.py", "return seconds", "return seconds * 2")
    checkout.ok("refresh", "wait-longer", *synthetic.header("Wait longer"))


def test_file_of_several_patches_needs_a_topic(stacked):
    second_engine_patch(stacked)
    stacked.edit("vllm/engine.py", "step + 1", "step + 7")
    assert stacked.fails("refresh") == (
        "vllm/vllm/engine.py is edited by several patches: name one: "
        "scripts/refresh.sh TOPIC, of step-by-two, wait-longer"
    )
    out = stacked.ok("refresh", "step-by-two")
    assert [line.split(":")[0] for line in out.splitlines()] == [
        "patches/step-by-two.patch",
        "patches/wait-longer.patch",
    ]
    assert "+    return step + 7\n" in stacked.patch("step-by-two.patch").read_text()
    assert "step + 7" not in stacked.patch("wait-longer.patch").read_text()
    assert_round_trip(stacked)


def test_edit_of_what_a_later_patch_changes(stacked):
    second_engine_patch(stacked)
    stacked.edit("vllm/engine.py", "seconds * 2", "seconds * 3")
    before = stacked.snapshot()
    assert stacked.fails("refresh", "step-by-two") == (
        "the edit of vllm/vllm/engine.py lies on lines that a later patch changes: "
        "fold it there: scripts/refresh.sh wait-longer"
    )
    assert stacked.snapshot() == before
    stacked.ok("refresh", "wait-longer")
    assert_round_trip(stacked)


def test_edit_back_to_upstream_drops_the_patch(stacked):
    stacked.edit("vllm/engine.py", "step + 1", "step")
    assert stacked.ok("refresh") == (
        "patches/step-by-two.patch: dropped, nothing is left of its edit\n"
    )
    assert stacked.patch("series").read_text() == "wide-layers.patch\n"
    assert not stacked.patch("step-by-two.patch").exists()
    assert "engine.py" not in (stacked.repo / "upstream.toml").read_text()
    assert_round_trip(stacked)


def test_series_keeps_its_comments(stacked):
    series = stacked.patch("series")
    series.write_text("# hooks\nstep-by-two.patch  # H1\nwide-layers.patch\n")
    stacked.edit("vllm/layers.py", "16", "8")
    stacked.ok("refresh")
    assert series.read_text() == "# hooks\nstep-by-two.patch  # H1\n"


def test_hand_made_patch_is_brought_into_form(stacked):
    patch = stacked.patch("step-by-two.patch")
    made = patch.read_bytes()
    patch.write_bytes(
        made.replace(b"Tests: tests/x.py\n", b"Tests: tests/x.py\n---\n").replace(
            b" @@\n", b" @@ def heading():\n"
        )
    )
    assert "rewritten" in stacked.ok("refresh")
    assert patch.read_bytes() == made


def test_patches_pulled_under_edits(stacked):
    stacked.edit("vllm/layers.py", "16", "32")
    patch = stacked.patch("step-by-two.patch")
    patch.unlink()
    stacked.patch("series").write_text("wide-layers.patch\n")
    assert stacked.fails("refresh") == (
        "the patches are not those that vllm/ was made from: run scripts/apply.sh "
        "first (with edits to keep: check out the patches they were made on, refresh "
        "there, then merge)"
    )


def test_refused_edits(stacked):
    (stacked.tree / "vllm" / "new.py").write_text("x = 1\n")
    assert stacked.fails("refresh").startswith(
        "new files (vllm/new.py) go into no patch"
    )
    (stacked.tree / "vllm" / "new.py").unlink()
    (stacked.tree / "README.md").unlink()
    assert stacked.fails("refresh") == (
        "patches delete no files (README.md): list them as [[removes]] in "
        "upstream.toml, or put them back"
    )
    stacked.ok("apply", "--discard-edits")
    (stacked.tree / "vllm" / "_C.abi3.so").write_bytes(b"x")
    assert stacked.fails("refresh").startswith(
        "files of the wheel (vllm/_C.abi3.so) cannot be patched"
    )
    stacked.ok("apply", "--discard-edits")
    (stacked.tree / "README.md").chmod(0o755)
    assert stacked.fails("refresh", "third", *synthetic.header("Edit")) == (
        "vllm/README.md changed its file mode (100644 to 100755), which a patch "
        "cannot: put it back"
    )
    (stacked.tree / "README.md").chmod(0o644)
    (stacked.tree / "README.md").write_bytes(b"\0")
    assert stacked.fails("refresh", "third", *synthetic.header("Edit")) == (
        "vllm/README.md is binary, which a patch cannot hold"
    )


def test_budget_is_kept(stacked):
    (stacked.tree / "LICENSE").write_text("All rights to all.\n")
    before = stacked.snapshot()
    arguments = ("refresh", "third", *synthetic.header("Shorten the licence"))
    assert stacked.fails(*arguments) == (
        "patches/third.patch: quotes 60 upstream lines, its budget is 40: move "
        "logic into an own file, or state a [[budget]] in upstream.toml"
    )
    assert stacked.snapshot() == before
    synthetic.budget(stacked, "third", 60)
    stacked.ok(*arguments)
    assert "rules hold" in stacked.ok("status", "--check")


def test_own_file_that_is_new(stacked):
    place = stacked.tree / "vllm" / "sub" / "ours two.py"
    place.parent.mkdir()
    place.write_text("x = 1\n")
    assert "take them as own files" in stacked.fails("refresh")
    assert stacked.ok("refresh", "--own", "vllm/vllm/sub/ours two.py") == (
        "vllm/vllm/sub/ours two.py: own file\n"
    )
    assert stacked.git("status", "--short", "-uall") == (
        ' M vllm/.gitignore\n?? "vllm/vllm/sub/ours two.py"\n'
    )
    stacked.commit()
    assert_round_trip(stacked)
    assert "rules hold" in stacked.ok("status", "--check")
    stacked.ok("refresh", "--disown", "vllm/sub/ours two.py")
    place.unlink()
    stacked.commit()
    assert_round_trip(stacked)


def test_own_file_in_an_upstream_files_place(stacked):
    stacked.edit("vllm/dos.py", "A = 1", "A = 'ours'")
    error = stacked.fails("refresh", "--own", "vllm/vllm/dos.py")
    assert error == (
        "vllm/vllm/dos.py is an upstream file: say why ours takes its place: "
        "scripts/refresh.sh --own vllm/vllm/dos.py --why REASON"
    )
    assert stacked.fails("refresh", "--own", "vllm/layers.py", "--why", "x") == (
        "patches/wide-layers.patch edits vllm/layers.py: take that out first "
        "(scripts/refresh.sh --drop wide-layers)"
    )
    stacked.ok("refresh", "--own", "vllm/vllm/dos.py", "--why", 'it is "ours"')
    stacked.commit()
    assert stacked.text("vllm/dos.py").startswith("A = 'ours'")
    assert_round_trip(stacked)
    stacked.ok("refresh", "--disown", "vllm/vllm/dos.py")
    assert "dos.py" not in (stacked.repo / "upstream.toml").read_text()
    facts = json.loads(stacked.ok("status", "--json"))
    assert facts["edits"]["modified"] == ["vllm/dos.py"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--own", "nowhere.py"], "vllm/nowhere.py is not there: write it first"),
        (["--own", "/etc/passwd"], "/etc/passwd is not a file below vllm/"),
        (
            ["--own", "vllm/_C.abi3.so"],
            "vllm/vllm/_C.abi3.so comes from the wheel and stays its own: use another "
            "name",
        ),
        (["--disown", "vllm/.gitignore"], "vllm/.gitignore cannot be taken off"),
    ],
)
def test_files_that_cannot_be_own(stacked, arguments, error):
    assert stacked.fails("refresh", *arguments) == error


def test_not_applied(bare):
    assert bare.fails("refresh") == "vllm/ is not applied: run scripts/apply.sh first"


def test_patches_are_mail_that_git_takes(stacked, tmp_path):
    """`git am` on the release makes the same texts."""
    clone = tmp_path / "clone"
    clone.mkdir()
    texts = {path: stacked.upstream.files[path] for path in ("vllm/engine.py",)}
    texts["vllm/layers.py"] = stacked.upstream.files["vllm/layers.py"]
    for path, data in texts.items():
        (clone / path).parent.mkdir(exist_ok=True)
        (clone / path).write_bytes(data)
    other = synthetic.Checkout(clone, stacked.upstream, stacked.cache)
    other.git("init", "-q")
    other.commit()
    other.git("am", "-q", *map(str, series(stacked)))
    for path in texts:
        assert (clone / path).read_text() == stacked.text(path)
    assert "Why: it is needed" in other.git("log", "-1", "--format=%B")


def test_the_budget_of_a_dropped_patch_goes_with_it(stacked):
    synthetic.budget(stacked, "wide-layers", 60)
    stacked.edit("vllm/layers.py", "16", "8")
    out = stacked.ok("refresh")
    assert "wide-layers.patch: dropped, nothing is left of its edit" in out
    assert "[[budget]]" not in (stacked.repo / "upstream.toml").read_text()
    stacked.commit()
    stacked.ok("status", "--check")
