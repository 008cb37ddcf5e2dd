"""Runs that stop half way: a patch, a signal, the disk, the archive, the network."""

import os
import shutil
import signal
import subprocess

import pytest
import synthetic

POINTS = [
    "before:release.source.Source.unpack",
    "after:release.source.Source.unpack",
    "after:tree.history.History.build",
    "before:tree.marker.write",
    "before:tree.place.swap",
    "after:tree.place.swap",
    "before:tree.history.History.settle",
    "after:tree.history.History.settle",
]
REMAKE = "scripts/refresh.sh --reseal, or make the edit again in the tree"


@pytest.fixture(scope="session")
def _changed(tmp_path_factory, _stacked):
    checkout = _stacked.copy(tmp_path_factory.mktemp("changed") / "stacked")
    old = checkout.content()
    checkout.edit("vllm/layers.py", "16", "32")
    checkout.ok("refresh")
    new = checkout.content()
    # The old tree under the new patches, as after a pull.
    checkout.commit()
    checkout.git("checkout", "-q", "HEAD~1", "--", "patches")
    checkout.ok("apply")
    checkout.git("checkout", "-q", "HEAD", "--", "patches")
    assert checkout.content() == old != new
    return checkout, old, new


@pytest.fixture
def changed(_changed, tmp_path):
    """A checkout whose tree is of an older stack than its patches; old, new tree."""
    checkout, old, new = _changed
    return checkout.copy(tmp_path / "changed"), old, new


def run_injected(checkout, event_and_point, *command):
    return subprocess.run(
        checkout.inject(event_and_point, *command),
        env=checkout.environment(),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("point", POINTS)
def test_killed_run_leaves_a_whole_tree(changed, point):
    checkout, old, new = changed
    assert run_injected(checkout, f"kill:{point}", "apply").returncode == -9
    assert checkout.content() in (old, new)
    if point != POINTS[-1]:
        assert checkout.run("apply", "--check").returncode == 1
    checkout.ok("apply")
    assert checkout.content() == new
    checkout.ok("apply", "--check")
    assert not (checkout.repo / ".tree.new").exists()


def test_killed_between_the_two_renames(changed):
    checkout, _, new = changed
    done = run_injected(checkout, "kill:after:tree.place._exchange", "apply")
    assert done.returncode == -9
    assert not checkout.tree.exists()
    assert checkout.fails("apply", "--check") == (
        "an earlier run was interrupted: run scripts/apply.sh"
    )
    checkout.ok("apply")
    assert checkout.content() == new


def test_system_without_exchange(changed):
    checkout, _, new = changed
    done = run_injected(checkout, "save:after:tree.place._exchange", "apply")
    # The event needs the tree, which is away between the renames.
    assert done.returncode == 1
    checkout.ok("apply")
    assert checkout.content() == new


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("point", POINTS[:4])
def test_interrupted_run_changes_nothing(changed, name, point):
    checkout, _, _ = changed
    before = checkout.snapshot()
    done = run_injected(checkout, f"{name}:{point}", "apply")
    assert done.returncode == 128 + getattr(signal, name)
    word = "interrupted" if name == "SIGINT" else "stopped"
    assert done.stderr.splitlines()[-1] == (
        f"error: {word}: the tree is whole: run it again when you like"
    )
    assert "Traceback" not in done.stderr
    assert checkout.snapshot() == before
    assert not (checkout.repo / ".tree.new").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_swap_is_not_interrupted(changed, name):
    checkout, _, new = changed
    done = run_injected(checkout, f"{name}:before:tree.place.swap", "apply")
    assert done.returncode == 128 + getattr(signal, name)
    assert checkout.content() == new
    checkout.ok("apply", "--check")


def test_second_run_waits_for_the_first(changed):
    checkout, _, new = changed
    first = subprocess.Popen(
        checkout.inject("pause:before:tree.place.swap", "apply"),
        env=checkout.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert first.stdout.readline() == "paused\n"
    assert checkout.fails("apply", "--check") == (
        "another run is at work on this checkout: wait for it"
    )
    second = subprocess.Popen(
        [checkout.repo / "scripts" / "apply.sh"],
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert second.stderr.readline() == (
        f"  waiting for another run on this checkout (process {first.pid})\n"
    )
    first.communicate("go\n", timeout=30)
    out, _ = second.communicate(timeout=30)
    assert first.returncode == second.returncode == 0
    assert "nothing to do" in out
    assert checkout.content() == new


def test_hunk_that_has_moved_makes_the_stated_text(stacked):
    """The context stands in two functions: where it goes is proven by the text."""
    expected = stacked.content()
    stacked.ok("apply", "--unapply")
    patch = stacked.patch("step-by-two.patch")
    patch.write_bytes(
        patch.read_bytes().replace(b"@@ -1,7 +1,7 @@", b"@@ -4,7 +4,7 @@")
    )
    stacked.ok("apply")
    assert stacked.content() == expected
    assert stacked.run("status", "--check").stdout == (
        "patches/step-by-two.patch: not in the form that git format-patch writes: "
        "scripts/refresh.sh --reseal\n"
    )


def test_hunk_in_the_wrong_function_is_caught(bare):
    """Git takes this patch and exits 0, with the edit in the wrong function."""
    bare.ok("apply")
    bare.edit(
        "vllm/engine.py",
        "step + 0\n    return step\n\n\ndef wait",
        "step + 5\n    return step\n\n\ndef wait",
    )
    bare.ok("refresh", "second", *synthetic.header("Edit the second function"))
    expected = bare.content()
    bare.ok("apply", "--unapply")
    patch = bare.patch("second.patch")
    hunk = (
        b"@@ -3,3 +3,3 @@\n     step = step * 2\n-    step = step + 0\n"
        b"+    step = step + 5\n     return step\n"
    )
    head = patch.read_bytes().partition(b"@@")[0]
    patch.write_bytes(head + hunk.replace(b"-3,3 +3,3", b"-2,3 +2,3"))
    error = bare.fails("apply")
    assert error == (
        "patches/second.patch would change vllm/engine.py in another way than it "
        f"was made to (it was edited by hand): {REMAKE}"
    )
    patch.write_bytes(head + hunk.replace(b"-3,3 +3,3", b"-8,3 +8,3"))
    bare.ok("apply")
    assert bare.content() == expected


def test_half_applied_series_leaves_the_old_tree(stacked):
    patch = stacked.patch("wide-layers.patch")
    patch.write_bytes(patch.read_bytes().replace(b"\n-WIDTH = 8", b"\n-WIDTH = 9"))
    before = stacked.snapshot()
    assert stacked.fails("apply") == (
        "patches/wide-layers.patch does not fit (error: patch failed: "
        "vllm/layers.py:1; error: vllm/layers.py: patch does not apply): " + REMAKE
    )
    assert stacked.snapshot() == before
    assert not (stacked.repo / ".tree.new").exists()
    stacked.ok("apply", "--unapply")
    before = stacked.snapshot()
    stacked.fails("apply")
    assert stacked.snapshot() == before


def test_patch_for_another_text(stacked):
    patch = stacked.patch("wide-layers.patch")
    text = patch.read_text()
    index = next(line for line in text.splitlines() if line.startswith("index "))
    patch.write_text(text.replace(index, "index " + "1" * 40 + index[46:]))
    error = stacked.fails("apply")
    assert error == (
        "patches/wide-layers.patch was made for another text of vllm/layers.py "
        f"(111111111111, found {index[6:18]}): {REMAKE}"
    )


def test_patch_that_upstream_has_taken(stacked, tmp_path):
    widened = synthetic.RELEASE["vllm/layers.py"].replace("8", "16")
    newer = synthetic.make_upstream(tmp_path, "9.9.0", {"vllm/layers.py": widened})
    (stacked.repo / "upstream.toml").write_text(synthetic.pins(newer))
    before = stacked.snapshot()
    sources = ["--from", str(newer.sdist), "--wheel", str(newer.wheel)]
    assert stacked.fails("apply", *sources) == (
        "patches/wide-layers.patch: vllm/layers.py already has this edit: "
        "upstream took it, so take it out: scripts/refresh.sh --drop wide-layers"
    )
    assert stacked.snapshot() == before


def test_corrupted_archive(bare, tmp_path):
    for option, good in (
        ("--from", bare.upstream.sdist),
        ("--wheel", bare.upstream.wheel),
    ):
        broken = tmp_path / good.name
        broken.write_bytes(good.read_bytes()[:-100])
        found = synthetic.sha256(broken.read_bytes())
        pinned = synthetic.sha256(good.read_bytes())
        assert bare.fails("apply", option, str(broken)) == (
            f"{broken} is not {good.name}: sha256 {found[:12]}..., upstream.toml pins "
            f"{pinned[:12]}...: fetch it again"
        )


def test_offline_without_a_cache(bare):
    shutil.rmtree(bare.cache)
    assert bare.fails("apply", "--offline") == (
        f"{bare.upstream.sdist.name} is not in the cache ({bare.cache}): run once "
        "without --offline, or give the file (--from FILE)"
    )


def test_corrupted_cache_is_fetched_again(bare, index):
    for archive in bare.cache.glob("archives/*/*"):
        archive.write_bytes(archive.read_bytes()[:50])
    bare.env["PIP_INDEX_URL"] = index
    done = bare.run("apply")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("its content is not what upstream.toml pins") == 2
    assert f"  fetching {bare.upstream.sdist.name}" in done.stderr
    assert bare.content() == synthetic.expected_tree(bare, {})
    # From now on the cache is enough.
    bare.env["PIP_INDEX_URL"] = synthetic.UNREACHABLE
    bare.ok("apply", "--unapply")
    bare.ok("apply")


def test_no_network(bare):
    shutil.rmtree(bare.cache / "archives")
    before = bare.snapshot()
    error = bare.fails("apply")
    assert error.startswith("cannot ask the package index on 127.0.0.1: ")
    assert error.endswith(": check the network or pip's index settings")
    assert bare.snapshot() == before
    assert not [it for it in bare.cache.rglob("*") if it.is_file()]


def test_unsafe_archives(bare, tmp_path):
    evil = tmp_path / bare.upstream.sdist.name
    synthetic.write_sdist(evil, "vllm-9.9.0", {"../../evil": b"x"})
    repin(bare, bare.upstream.sdist, evil)
    assert f"{evil} is not safe to unpack" in bare.fails("apply", "--from", str(evil))
    links = {"out": "../../../../evil"}
    synthetic.write_sdist(evil, "vllm-9.9.0", {"a": b"x"}, links)
    (bare.repo / "upstream.toml").write_text(synthetic.pins(bare.upstream))
    repin(bare, bare.upstream.sdist, evil)
    assert f"{evil} is not safe to unpack" in bare.fails("apply", "--from", str(evil))
    (bare.repo / "upstream.toml").write_text(synthetic.pins(bare.upstream))
    wheel = tmp_path / bare.upstream.wheel.name
    package = {k: v for k, v in bare.upstream.files.items() if k.startswith("vllm/")}
    synthetic.write_wheel(wheel, "9.9.0", package | {"vllm/../../evil": b"x"})
    repin(bare, bare.upstream.wheel, wheel)
    assert bare.fails("apply", "--wheel", str(wheel)) == (
        f"{wheel} is not safe to unpack: vllm/../../evil"
    )
    assert not list(bare.repo.parent.rglob("evil"))


def repin(checkout, old, new):
    pins = checkout.repo / "upstream.toml"
    digests = [synthetic.sha256(path.read_bytes()) for path in (old, new)]
    pins.write_text(pins.read_text().replace(*digests))


def test_read_only_checkout(bare, mount):
    mount("--bind", bare.repo, bare.repo)
    mount("-o", "remount,bind,ro", bare.repo)
    before = bare.snapshot()
    assert bare.fails("apply") == (
        f"{bare.repo}/.tree.lock: Read-only file system: mend that and run again"
    )
    assert bare.snapshot() == before


FULL = (
    "the disk is full: apply needs about 2 GB free beside vllm/ and in the cache: free "
    "some and run again"
)


@pytest.mark.parametrize("room_kib", [0, 40, 80, 120])
def test_full_disk(bare, mount, tmp_path, room_kib):
    saved = tmp_path / "saved"
    shutil.copytree(bare.repo, saved, ignore=shutil.ignore_patterns(".git"))
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", bare.repo)
    shutil.copytree(saved, bare.repo, dirs_exist_ok=True)
    ballast = bare.repo / "ballast"
    with ballast.open("wb") as stream:
        free = os.statvfs(bare.repo)
        stream.write(bytes(free.f_bavail * free.f_frsize - room_kib * 1024))
    before = bare.snapshot()
    assert bare.fails("apply") == FULL
    assert bare.snapshot() == before
    assert not (bare.repo / ".tree.new").exists()
    ballast.unlink()
    bare.ok("apply")


@pytest.mark.parametrize("point", POINTS[:4])
def test_disk_that_fills_up_under_an_old_tree(changed, point):
    checkout, _, _ = changed
    before = checkout.snapshot()
    done = run_injected(checkout, f"full:{point}", "apply")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"error: {FULL}"
    assert checkout.snapshot() == before


def refold(checkout):
    """Edits that go into two patches."""
    checkout.edit("vllm/engine.py", "step + 1", "step + 2")
    checkout.edit("vllm/layers.py", "16", "32")
    return ["refresh"]


def begin(checkout):
    """An edit that becomes a patch: pins, patch and series."""
    checkout.edit("vllm/dos.py", "A = 1", "A = 2")
    return ["refresh", "dos", *synthetic.header("Count from two")]


def replace(checkout):
    """An own file in an upstream file's place: pins and manifest."""
    checkout.edit("vllm/dos.py", "A = 1", "A = 2")
    return ["refresh", "--own", "vllm/vllm/dos.py", "--why", "ours"]


@pytest.mark.parametrize(
    "event",
    [
        "kill:after:stack.rewrite.write*2",
        "kill:after:stack.rewrite.write*3",
        "kill:before:tree.Tree.adopt",
        "kill:after:tree.marker.write",
        "kill:after:tree.history.History.settle",
        "full:after:stack.rewrite.write*3",
        "full:before:tree.marker.write",
        "full:after:tree.marker.write",
    ],
)
@pytest.mark.parametrize("prepare", [refold, begin, replace])
def test_refresh_that_stops_half_way(stacked, prepare, event):
    command = prepare(stacked)
    tree = stacked.content()
    before = stacked.snapshot()
    done = run_injected(stacked, event, *command)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    if event.startswith("full"):
        assert synthetic.said(done.stderr) == [f"error: {FULL}"]
        assert stacked.snapshot() == before
    if stacked.run(*command).returncode:
        # All was written but what the tree says of itself, which apply mends.
        stacked.ok("apply")
    stacked.ok("apply", "--check")
    assert stacked.ok("refresh") == "nothing to do\n"
    # The edits lie in the tree whatever happens.
    manifest = "vllm/.gitignore"
    assert stacked.content() | {manifest: b""} == tree | {manifest: b""}
    assert not (stacked.repo / ".tree.undo").exists()
