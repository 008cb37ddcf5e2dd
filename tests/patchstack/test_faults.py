"""What went wrong once in hostile surroundings, by hand on the real stack."""

import http.server
import json
import os
import shutil
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import synthetic
from patchstack.tree import marker
from test_failures import FULL, run_injected

ITSELF = (
    "--from {} holds this checkout, which would be copied into itself: name a folder "
    "with upstream's source"
)
OF_TODAY = Path(__file__).with_name("marker.json")


@pytest.mark.parametrize(
    "way", ["here", "parent", "root", "link", "relative", "rebase"]
)
def test_a_source_that_holds_the_checkout(stacked, tmp_path, way):
    link = tmp_path / "a link"
    link.symlink_to(stacked.repo.parent)
    (stacked.repo / ".rebase").mkdir()
    source = {
        "here": ".",
        "parent": "..",
        "root": "/",
        "link": str(link),
        "relative": "vllm/../../.",
        "rebase": ".rebase",
    }[way]
    before = stacked.snapshot()
    for command in (["apply"], ["rebase", "9.10.0"]):
        assert stacked.fails(*command, "--from", source) == ITSELF.format(source)
    assert stacked.snapshot() == before
    assert not (stacked.repo / ".tree.new").exists()


def test_a_source_that_is_mounted_elsewhere(stacked, mount, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    mount("--bind", stacked.repo, other)
    assert stacked.fails("apply", "--from", str(other)) == ITSELF.format(other)


@pytest.mark.parametrize(
    "variables",
    [
        {"PIP_TARGET": "{tmp}"},
        {"PIP_PREFIX": "{tmp}"},
        {"PIP_DRY_RUN": "1"},
        {"PIP_USER": "1"},
        {"PIP_REQUIRE_VIRTUALENV": "1"},
        {"PIP_NO_BINARY": ":all:"},
        {"PIP_QUIET": "3"},
        {"PIP_CONFIG_FILE": "{tmp}/pip.conf"},
    ],
    ids=lambda it: " ".join(it),
)
def test_what_pip_is_set_to_install_is_nothing_to_us(
    stacked,
    index,
    tmp_path,
    variables,
):
    (tmp_path / "pip.conf").write_text("[global]\ntarget = /nowhere\nuser = true\n")
    stacked.ok("apply", "--unapply")
    shutil.rmtree(stacked.cache)
    stacked.env["PIP_INDEX_URL"] = index
    for name, value in variables.items():
        stacked.env[name] = value.format(tmp=tmp_path)
    assert "applied" in stacked.ok("apply")
    assert sorted(it.name for it in stacked.cache.iterdir()) == ["archives"]


@pytest.mark.parametrize("value", ["1", "true", "Yes"])
def test_no_index_is_obeyed(bare, index, tmp_path, value):
    for archive in bare.cache.glob("archives/*/*.tar.gz"):
        archive.write_bytes(b"junk")
    bare.env.update(PIP_INDEX_URL=index, PIP_NO_INDEX=value)
    assert bare.fails("apply") == (
        "pip is set to use no index (no-index): give the files: scripts/apply.sh "
        "--from SDIST --wheel WHEEL"
    )
    links = tmp_path / "links"
    links.mkdir()
    shutil.copy2(bare.upstream.sdist, links)
    bare.env["PIP_FIND_LINKS"] = str(links)
    bare.ok("apply")


def file(name, url):
    return {"filename": name, "url": url, "hashes": {}}


class Private(http.server.SimpleHTTPRequestHandler):
    """An index for those who know the word, in the form of PEP 691."""

    def do_GET(self):
        if self.headers["Authorization"] != "Basic YWRhOm3DtnQ=":
            self.send_error(401)
        elif self.path == "/simple/vllm/":
            names = [it for it in os.listdir(self.directory) if it.startswith("vllm-")]
            files = [
                {"filename": it, "url": f"../../{it}", "hashes": {}} for it in names
            ]
            files.append({"filename": "vllm-9.99.0.tar.gz", "url": "x", "yanked": True})
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.end_headers()
            self.wfile.write(json.dumps({"files": files}).encode())
        else:
            self.headers.replace_header("Authorization", "")
            super().do_GET()

    def log_message(self, *_):
        pass


def test_a_private_index(bare, tmp_path):
    for archive in (bare.upstream.sdist, bare.upstream.wheel):
        shutil.copy2(archive, tmp_path)
    shutil.rmtree(bare.cache)
    handler = partial(Private, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}/simple"
        bare.env["PIP_INDEX_URL"] = f"http://ada:wrong@{host}"
        error = bare.fails("apply")
        bare.env["PIP_INDEX_URL"] = f"http://ada:m%C3%B6t@{host}"
        done = bare.run("rebase", "latest")
        server.shutdown()
    assert error.startswith("cannot ask the package index on 127.0.0.1: HTTP Error 401")
    assert "wrong" not in error
    assert done.stdout.endswith("is the newest release\n"), done.stderr


def test_refresh_of_a_tree_that_lacks_an_own_file(stacked):
    stacked.edit("vllm/layers.py", "16", "32")
    (stacked.tree / "vllm" / "ours.py").unlink()
    before = stacked.snapshot()
    assert stacked.fails("refresh").startswith(
        "own file vllm/vllm/ours.py is missing: "
    )
    assert stacked.snapshot() == before
    stacked.git("checkout", "-q", "vllm/vllm/ours.py")
    stacked.ok("refresh")


@pytest.mark.parametrize(
    "point", ["before:tree.marker.write", "after:tree.marker.write"]
)
def test_refresh_whose_end_finds_no_room(stacked, point):
    stacked.edit("vllm/layers.py", "16", "32")
    before = stacked.snapshot()
    done = run_injected(stacked, f"full:{point}", "refresh")
    assert done.returncode == 1
    assert stacked.snapshot() == before
    stacked.ok("refresh")
    stacked.ok("apply", "--check")


def test_refresh_beside_a_patched_file_that_is_gone(stacked):
    stacked.edit("vllm/layers.py", "16", "32")
    (stacked.tree / "vllm" / "engine.py").unlink()
    before = stacked.snapshot()
    assert stacked.fails("refresh", "wide-layers", "vllm/vllm/layers.py") == (
        "vllm/vllm/engine.py is missing: restore it from git, or run scripts/apply.sh "
        "--discard-edits"
    )
    assert stacked.snapshot() == before


@pytest.mark.parametrize("command", ["apply", "refresh"])
def test_edits_in_a_tree_that_has_lost_its_history(stacked, command):
    expected = stacked.git("--git-dir=.tree.git", "log", "--format=%H")
    shutil.rmtree(stacked.repo / ".tree.git")
    stacked.edit("vllm/layers.py", "16", "32")
    done = stacked.run(command)
    assert "  making .tree.git again\n" in done.stderr
    if command == "apply":
        assert "vllm/ has local edits (changed: vllm/layers.py)" in done.stderr
        assert stacked.git("--git-dir=.tree.git", "log", "--format=%H") == expected
        stacked.ok("refresh")
    assert "+WIDTH = 32\n" in stacked.patch("wide-layers.patch").read_text()
    stacked.ok("apply", "--check")


def test_edits_that_cannot_be_told(stacked):
    shutil.rmtree(stacked.repo / ".tree.git")
    stacked.patch("series").write_text("step-by-two.patch\n")
    before = stacked.content()
    assert stacked.fails("apply") == (
        "vllm/ was made from another stack than patches/ now holds, and .tree.git is "
        "gone, so its edits cannot be told: check out the patches it was made from, or "
        "drop the edits with scripts/apply.sh --discard-edits"
    )
    assert stacked.content() == before
    stacked.ok("apply", "--discard-edits")


def test_unapply_of_a_tree_that_has_lost_its_history(stacked):
    shutil.rmtree(stacked.repo / ".tree.git")
    stacked.ok("apply", "--unapply")


def test_a_marker_of_code_to_come(stacked):
    place = stacked.tree / marker.MARKER
    place.write_text(json.dumps(json.loads(place.read_text()) | {"news": [1]}))
    assert "nothing to do" in stacked.ok("apply")
    stacked.edit("vllm/layers.py", "16", "32")
    error = stacked.fails("apply", "--check")
    assert error.startswith("vllm/ has local edits (changed: vllm/layers.py): ")


def test_todays_marker_is_read_and_written_for_good(tmp_path):
    """Code of other commits reads what this writes, and the other way round."""
    text = OF_TODAY.read_text()
    (tmp_path / marker.MARKER).write_text(text)
    found = marker.read(tmp_path)
    assert asdict(found) == json.loads(text)
    marker.write(tmp_path, found)
    assert (tmp_path / marker.MARKER).read_text() == text


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002, 0o000])
def test_modes_do_not_follow_from_the_umask(stacked, umask):
    def modes():
        return {
            str(it.relative_to(stacked.tree)): it.lstat().st_mode & 0o777
            for it in [stacked.tree, *stacked.tree.rglob("*")]
        }

    stacked.ok("apply", "--unapply")
    stacked.ok("apply")
    expected = modes()
    assert set(expected.values()) <= {0o755, 0o644, 0o777}
    stacked.ok("apply", "--unapply")
    before = os.umask(umask)
    try:
        stacked.ok("apply")
    finally:
        os.umask(before)
    assert modes() == expected


def test_a_missing_own_file_is_seen(stacked):
    (stacked.tree / "vllm" / "ours.py").unlink()
    facts = json.loads(stacked.ok("status", "--json"))
    assert facts["drift"].startswith("own file vllm/vllm/ours.py is missing: ")
    assert stacked.run("apply", "--check").returncode == 1
    assert stacked.run("status", "--check").returncode == 1


def test_status_of_a_tree_that_may_only_be_read(stacked, mount):
    patch = stacked.patch("wide-layers.patch")
    patch.write_bytes(patch.read_bytes().replace(b"it is needed", b"wide is better"))
    stacked.ok("apply")
    expected, rules = stacked.ok("status"), stacked.ok("status", "--check")
    patch.write_bytes(patch.read_bytes().replace(b"wide is better", b"never built"))
    changed = stacked.ok("status")
    assert "wide-layers.patch: changed since apply" in changed
    mount("--bind", stacked.repo, stacked.repo)
    mount("-o", "remount,bind,ro", stacked.repo)
    assert stacked.ok("status") == changed
    mount("-o", "remount,bind,rw", stacked.repo)
    patch.write_bytes(patch.read_bytes().replace(b"never built", b"wide is better"))
    mount("-o", "remount,bind,ro", stacked.repo)
    assert (stacked.ok("status"), stacked.ok("status", "--check")) == (expected, rules)


def test_a_full_folder_for_temporary_files_is_named(stacked, mount, tmp_path):
    place = tmp_path / "tmp"
    place.mkdir()
    # Room for a folder and a file, as Python tries it, and for nothing more.
    mount("-t", "tmpfs", "-o", "size=64k,nr_inodes=3", "tmpfs", place)
    stacked.env["TMPDIR"] = str(place)
    stacked.edit("vllm/layers.py", "16", "32")
    assert stacked.fails("refresh") == (
        f"the disk of {place} is full: free some of it, or set TMPDIR to another "
        "folder, and run again"
    )


@pytest.mark.parametrize(
    "said",
    [
        "fatal: sha1 file '/x' write error. Out of diskspace",
        "error: file write error: No space left on device",
        "fatal: cannot store: Disk quota exceeded",
    ],
)
def test_a_full_disk_in_gits_words(stacked, tmp_path, said):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").write_text(
        f'#!/bin/sh\ncase " $* " in *" write-tree "*) echo "{said}" >&2; exit 128;; '
        f'esac\nexec {shutil.which("git")} "$@"\n'
    )
    (tools / "git").chmod(0o755)
    stacked.edit("vllm/layers.py", "16", "32")
    stacked.env["PATH"] = f"{tools}:{stacked.environment()['PATH']}"
    assert stacked.fails("refresh") == FULL


def test_accept_without_the_wheel_writes_nothing(stacked, tmp_path):
    newer = synthetic.make_upstream(tmp_path, "9.10.0")
    stacked.offer(newer)
    wheel = next(stacked.cache.glob(f"archives/*/{newer.wheel.name}"))
    stacked.ok("rebase", "9.10.0")
    wheel.write_bytes(b"junk")
    before = stacked.snapshot()
    kill = "kill:before:stack.rewrite.keep"
    done = run_injected(stacked, kill, "rebase", "--accept", "--offline")
    assert done.returncode == 1
    assert f"error: {newer.wheel.name} is not in the cache" in done.stderr
    assert stacked.snapshot() == before
