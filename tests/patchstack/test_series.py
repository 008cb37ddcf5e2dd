"""The series as a whole: out, moved, put right, merged, taken from elsewhere."""

import subprocess

import pytest
import synthetic
from test_refresh import assert_round_trip

NAMES = ["step-by-two.patch", "wide-layers.patch"]


def series(checkout):
    return checkout.patch("series").read_text().split()


@pytest.fixture
def stepped(stacked):
    """A third patch, on the file of the first, below its hunk."""
    stacked.edit("vllm/engine.py", "return seconds", "return seconds * 2")
    stacked.ok("refresh", "wait-longer", *synthetic.header("Wait longer"))
    stacked.commit()
    return stacked


def test_drop_seals_what_was_built_on_it(stepped):
    out = stepped.ok("refresh", "--drop", "step-by-two")
    assert out.splitlines() == [
        "patches/wait-longer.patch: resealed, re-anchored",
        "patches/step-by-two.patch: taken out; to have it back: scripts/refresh.sh "
        "--import .dropped/step-by-two.patch",
    ]
    assert series(stepped) == ["wide-layers.patch", "wait-longer.patch"]
    assert "step + 1" not in stepped.text("vllm/engine.py")
    assert "seconds * 2" in stepped.text("vllm/engine.py")
    stepped.commit()
    assert "rules hold" in stepped.ok("status", "--check")
    assert_round_trip(stepped)


def test_a_dropped_patch_comes_back_with_its_words(stepped):
    old = stepped.patch("step-by-two.patch").read_bytes()
    before = stepped.content()
    words = ("--author", "Zoë <zoe@example.org>", "--body", "For Bob.")
    stepped.ok("refresh", "step-by-two", *words)
    stepped.ok("refresh", "--drop", "step-by-two")
    out = stepped.ok(
        "refresh", "--import", f"{stepped.repo}/.dropped/step-by-two.patch"
    )
    assert out == "patches/step-by-two.patch: new, re-anchored\n"
    assert series(stepped)[-1] == "step-by-two.patch"
    assert stepped.content() == before
    text = stepped.patch("step-by-two.patch").read_text()
    assert "\nFrom: Zoë <zoe@example.org>\n" in text
    assert f"\n{date(old.decode())}\n" in text
    assert "\n\nFor Bob.\n\nWhy: it is needed\n" in text
    assert_round_trip(stepped)


def date(text):
    return next(line for line in text.splitlines() if line.startswith("Date: "))


def test_the_words_of_a_dropped_patch_serve_a_new_edit(stacked):
    old = stacked.patch("wide-layers.patch").read_text()
    stacked.ok("refresh", "--drop", "wide-layers")
    stacked.edit("vllm/layers.py", "8", "32")
    stacked.ok("refresh", "wide-layers")
    new = stacked.patch("wide-layers.patch").read_text()
    assert new.partition("\ndiff ")[0] == old.partition("\ndiff ")[0]
    assert_round_trip(stacked)


def test_move(stepped):
    before = stepped.content()
    out = stepped.ok("refresh", "--move", "wait-longer", "--before", "step-by-two")
    assert out.splitlines() == [
        "patches/wait-longer.patch: resealed, re-anchored",
        "patches/step-by-two.patch: resealed, re-anchored",
        "patches/wait-longer.patch: patch 1 of 3",
    ]
    assert series(stepped) == ["wait-longer.patch", *NAMES]
    assert stepped.content() == before
    assert_round_trip(stepped)
    stepped.ok("refresh", "--move", "wait-longer")
    assert series(stepped) == [*NAMES, "wait-longer.patch"]
    assert stepped.git("status", "--short") == ""


def test_order_made_by_hand(stepped):
    order = ["wait-longer.patch", *NAMES]
    stepped.patch("series").write_text("".join(f"{it}\n" for it in order))
    assert "was made for another text of vllm/engine.py" in stepped.fails("apply")
    stepped.ok("refresh", "--reseal")
    assert series(stepped) == order
    assert_round_trip(stepped)
    assert stepped.ok("refresh", "--reseal") == "nothing to do\n"


def test_patch_taken_off_the_series_by_hand(stepped):
    stepped.patch("step-by-two.patch").unlink()
    stepped.patch("series").write_text("wide-layers.patch\nwait-longer.patch\n")
    assert stepped.ok("refresh", "--reseal") == (
        "patches/wait-longer.patch: resealed, re-anchored\n"
    )
    assert_round_trip(stepped)


def test_two_branches_that_refresh_one_patch(stacked):
    """They conflict on the index line alone; whichever is kept, the text is right."""
    stacked.edit("vllm/engine.py", "return seconds", "return seconds * 2")
    stacked.ok("refresh", "step-by-two")
    stacked.commit()
    stacked.git("branch", "other")
    stacked.edit("vllm/engine.py", "step + 1", "step + 5")
    stacked.ok("refresh")
    stacked.commit()
    expected = stacked.text("vllm/engine.py").replace("seconds * 2", "seconds * 7")
    stacked.git("checkout", "-q", "other")
    stacked.ok("apply")
    stacked.edit("vllm/engine.py", "seconds * 2", "seconds * 7")
    stacked.ok("refresh")
    stacked.commit()
    merge = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "merge", "master"]
    done = subprocess.run(merge, cwd=stacked.repo, capture_output=True, text=True)
    assert done.returncode == 1
    patch = stacked.patch("step-by-two.patch")
    text = patch.read_text()
    assert text.count("<<<<<<< ") == 1
    assert stacked.fails("apply") == (
        "patches/step-by-two.patch has the conflict markers of a merge: settle them "
        "(of two index lines keep either), then scripts/refresh.sh --reseal"
    )
    head, _, rest = text.partition("<<<<<<< ")
    ours = rest.partition("\n")[2].partition("=======\n")[0]
    patch.write_text(head + ours + rest.partition(">>>>>>> ")[2].partition("\n")[2])
    assert "in another way than it was made to" in stacked.fails("apply")
    assert stacked.ok("refresh", "--reseal") == (
        "patches/step-by-two.patch: resealed, re-anchored\n"
    )
    assert stacked.text("vllm/engine.py") == expected
    stacked.commit()
    assert "rules hold" in stacked.ok("status", "--check")
    assert_round_trip(stacked)


def test_a_hunk_moved_by_hand(stepped):
    """One patch is split: its second hunk goes into a copy with other words."""
    stepped.edit("vllm/layers.py", "return WIDTH", "return WIDTH + 1")
    stepped.ok("refresh", "wide-layers", *("--body", "Both."))
    stepped.edit("vllm/engine.py", "step * 2", "step * 3")
    stepped.ok("refresh", "wait-longer")
    expected = stepped.content()
    text = stepped.patch("wait-longer.patch").read_text()
    head, first, second = text.split("\n@@ ")
    stepped.patch("wait-longer.patch").write_text(f"{head}\n@@ {second}")
    copy = f"{head}\n@@ {first}\n".replace("Wait longer", "Step by three")
    stepped.patch("step-by-three.patch").write_text(copy)
    with stepped.patch("series").open("a") as file:
        file.write("step-by-three.patch\n")
    stepped.ok("refresh", "--reseal")
    assert stepped.content() == expected
    assert "step * 3" in stepped.patch("step-by-three.patch").read_text()
    assert "step * 3" not in stepped.patch("wait-longer.patch").read_text()
    assert_round_trip(stepped)


@pytest.fixture
def entangled(stacked):
    """A second patch on the line of the first."""
    stacked.edit("vllm/engine.py", "step + 1", "step + 2")
    stacked.ok("refresh", "step-by-three", *synthetic.header("Step by three"))
    stacked.commit()
    return stacked


def test_conflict_is_settled_by_a_rebase_onto_the_same_release(entangled):
    before = entangled.snapshot()
    assert entangled.fails("refresh", "--drop", "step-by-two") == (
        "in conflict: step-by-three.patch on vllm/engine.py; nothing was written: "
        "settle it: scripts/rebase.sh 9.9.0 --drop step-by-two"
    )
    assert entangled.fails(
        "refresh", "--move", "step-by-three", "--before", "step-by-two"
    ) == (
        "in conflict: step-by-three.patch on vllm/engine.py; nothing was written: "
        "settle it: order patches/series by hand, then scripts/rebase.sh 9.9.0"
    )
    assert entangled.snapshot() == before
    assert entangled.run("rebase", "9.9.0", "--drop", "step-by-two").returncode == 3
    done = entangled.run("rebase", "--continue")
    assert done.returncode == 3
    assert (
        "  1 file with conflict markers left in .rebase/files/: vllm/engine.py\n"
    ) in done.stderr
    work = entangled.repo / ".rebase" / "files" / "vllm" / "engine.py"
    settled = entangled.text("vllm/engine.py")
    work.write_text(settled)
    assert entangled.run("rebase", "--continue").returncode == 0
    out = entangled.ok("rebase", "--accept")
    assert out.splitlines()[:3] == [
        "patches/step-by-two.patch: taken off the series",
        "patches/wide-layers.patch: clean",
        "patches/step-by-three.patch: resolved",
    ]
    assert series(entangled) == ["wide-layers.patch", "step-by-three.patch"]
    assert entangled.text("vllm/engine.py") == settled
    assert entangled.text("vllm/_version.py") == '__version__ = "9.9.0+ours.1"\n'
    entangled.commit()
    assert "rules hold" in entangled.ok("status", "--check")
    assert_round_trip(entangled)


def test_hunk_that_fits_nowhere_is_told(stacked):
    patch = stacked.patch("wide-layers.patch")
    text = patch.read_text()
    index = next(line for line in text.splitlines() if line.startswith("index "))
    text = text.replace(index, f"index {'1' * 40}{index[46:]}")
    patch.write_text(text.replace("-WIDTH = 8", "-WIDTH = 9"))
    assert stacked.fails("refresh", "--reseal") == (
        "in conflict: wide-layers.patch on vllm/layers.py; nothing was written: settle "
        "it: scripts/rebase.sh 9.9.0"
    )
    stacked.run("rebase", "9.9.0")
    work = stacked.repo / ".rebase" / "files" / "vllm" / "layers.py"
    assert work.read_text().endswith(
        "<<<<<<< end of the file\n||||||| \n=======\n@@ -1,4 +1,4 @@\n-WIDTH = 9\n"
        "+WIDTH = 16\n \n \n def layers():\n>>>>>>> patches/wide-layers.patch\n"
    )


def test_edits_are_not_carried(stacked):
    stacked.edit("vllm/layers.py", "16", "24")
    before = stacked.snapshot()
    for options in (["--reseal"], ["--drop", "wide-layers"], ["--move", "wide-layers"]):
        error = stacked.fails("refresh", *options)
        assert error.startswith("vllm/ has local edits (changed: vllm/layers.py)")
    assert stacked.snapshot() == before


def test_unknown_topics(stacked):
    assert stacked.fails("refresh", "--drop", "gone") == (
        "no patch 'gone': there are step-by-two, wide-layers"
    )
    assert stacked.fails("refresh", "x", "--before", "y") == (
        "--before goes with --move: it says where the patch goes"
    )


OURS = synthetic.header("x")[2:]


@pytest.fixture
def upstreams(stacked, tmp_path):
    """A clone of upstream with a commit to take, and its patch."""
    folder = tmp_path / "upstream"
    for path, data in stacked.upstream.files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    other = synthetic.Checkout(folder, stacked.upstream, stacked.cache)
    other.git("init", "-q")
    other.commit()
    engine = folder / "vllm" / "engine.py"
    engine.write_text(
        engine.read_text().replace("return seconds", "return 2 * seconds")
    )
    (folder / "README.md").write_text("An engine that waits.\n")
    (folder / "vllm" / "new.py").write_text("NEW = 1\n")
    other.git("add", "-A")
    message = (
        "[Bugfix] Wait long (#42)\n\nAs said in näïve words.\n\nSigned-off-by: Bob"
    )
    author = ("--author", "Bob Å <bob@example.org>", "--date", "2026-10-11T12:13:14Z")
    other.git("commit", "-q", *author, "-m", message)
    return other


ONLY = ("vllm/engine.py", "README.md")


@pytest.mark.parametrize(
    "options", [["--abbrev=7"], ["-U1", "--full-index"], ["--attach"], ["-p", "--stat"]]
)
def test_an_upstream_commit_is_taken_over(stacked, upstreams, tmp_path, options):
    mail = tmp_path / "mail"
    mail.write_text(upstreams.git("format-patch", "--stdout", "-1", *options))
    assert stacked.fails("refresh", "--import", str(mail), *OURS).startswith(
        f"--import {mail}: 'diff --git a/vllm/new.py b/vllm/new.py', 'new file mode "
    )
    out = stacked.ok("refresh", "longer", *ONLY, "--import", str(mail), *OURS)
    assert out == "patches/longer.patch: new, re-anchored\n"
    text = stacked.patch("longer.patch").read_text()
    assert text.partition("\ndiff ")[0].splitlines() == [
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001",
        "From: Bob Å <bob@example.org>",
        "Date: Sun, 11 Oct 2026 12:13:14 +0000",
        "Subject: [PATCH] [Bugfix] Wait long (#42)",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=utf-8",
        "Content-Transfer-Encoding: 8bit",
        "",
        "As said in näïve words.",
        "",
        "Signed-off-by: Bob",
        "Why: it is needed",
        "Upstream-status: none",
        "Drop-when: tests/x.py::test_y",
        "Tests: tests/x.py",
    ]
    assert "return 2 * seconds" in stacked.text("vllm/engine.py")
    assert stacked.text("README.md") == "An engine that waits.\n"
    stacked.commit()
    assert "rules hold" in stacked.ok("status", "--check")
    assert_round_trip(stacked)


def test_the_topic_of_an_import_is_its_files_name(stacked, upstreams, tmp_path):
    mail = tmp_path / "0001-Wait-long.patch"
    mail.write_text(upstreams.git("format-patch", "--stdout", "-1", "--", "README.md"))
    assert stacked.fails("refresh", "--import", str(mail)).startswith(
        "the new patch 'wait-long' needs --why --upstream-status --drop-when --tests, "
    )
    stacked.ok("refresh", "--import", str(mail), *OURS)
    assert series(stacked)[-1] == "wait-long.patch"
    assert stacked.fails("refresh", "--import", str(mail), *OURS) == (
        "there is a patch 'wait-long' already: name another TOPIC"
    )


def test_a_diff_is_taken_over(stacked, upstreams, tmp_path):
    diff = tmp_path / "diff"
    diff.write_text(upstreams.git("diff", "HEAD~1", "--", "README.md"))
    assert stacked.fails("refresh", "words", "--import", str(diff), *OURS).startswith(
        "the new patch 'words' needs --subject, for example: "
    )
    header = synthetic.header("Say that it waits")
    stacked.ok("refresh", "words", "--import", str(diff), *header)
    assert "\nFrom: Ada <ada@example.org>\n" in stacked.patch("words.patch").read_text()


def test_imports_that_fail(stacked, upstreams, tmp_path):
    place = tmp_path / "it"
    assert stacked.fails("refresh", "--import", str(place)) == (
        f"--import {place}: No such file or directory"
    )
    for text in ("", "hello\n", "From: a\n\nhello\n"):
        place.write_text(text)
        assert stacked.fails("refresh", "x", "--import", str(place)) == (
            f"--import {place}: neither a mail of git's nor a diff"
        )
    place.write_text(upstreams.git("format-patch", "--stdout", "-1"))
    command = ("refresh", "x", "vllm/dos.py", "--import", str(place), *OURS)
    assert stacked.fails(*command) == f"--import {place} does not edit vllm/dos.py"
    stacked.edit("vllm/engine.py", "return seconds", "return 3 * seconds")
    stacked.ok("refresh")
    before = stacked.snapshot()
    command = ("refresh", "x", "vllm/engine.py", "--import", str(place), *OURS)
    assert stacked.fails(*command) == (
        "in conflict: x.patch on vllm/engine.py; nothing was written: settle it: make "
        "the edit in vllm/, then scripts/refresh.sh x"
    )
    assert stacked.snapshot() == before


def test_no_patch_is_by_nobody(stacked):
    stacked.git("config", "--unset", "user.name")
    stacked.edit("README.md", "An engine.", "An engine")
    command = ("refresh", "third", *synthetic.header("Drop a full stop"))
    assert stacked.fails(*command) == (
        "the new patch 'third' needs --author 'NAME <ADDRESS>', or user.name and "
        "user.email in git's configuration"
    )
    assert stacked.fails(*command, "--author", "Ada") == (
        "--author 'Ada': give it as 'NAME <ADDRESS>'"
    )
    stacked.ok(*command, "--author", "Ada L. <ada@example.org>")
    assert "\nFrom: Ada L <ada@" in stacked.patch("third.patch").read_text()
    assert_round_trip(stacked)


def test_an_own_file_is_renamed(stacked):
    (stacked.tree / "vllm" / "ours.py").rename(stacked.tree / "vllm" / "renamed.py")
    stacked.ok("refresh", "--disown", "vllm/vllm/ours.py")
    assert stacked.ok("refresh", "--own", "vllm/vllm/renamed.py") == (
        "vllm/vllm/renamed.py: own file\n"
    )
    stacked.commit()
    assert "rules hold" in stacked.ok("status", "--check")
    assert_round_trip(stacked)


@pytest.mark.parametrize("event", ["kill", "full"])
@pytest.mark.parametrize("point", ["before:tree.make.apply", "after:tree.make.apply"])
def test_a_drop_that_stops_half_way(stepped, event, point):
    before = stepped.content()
    command = ("refresh", "--drop", "step-by-two")
    done = subprocess.run(
        stepped.inject(f"{event}:{point}", *command),
        env=stepped.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode
    stepped.ok("apply")
    assert stepped.content() == before
    assert stepped.git("status", "--short") == ""
