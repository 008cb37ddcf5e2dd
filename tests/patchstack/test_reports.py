"""The real stack on real releases: what going back says, and what goes upstream.

`reports/` shows what a report looks like.  After a change of the hooks, write them
again with `scripts/rebase.sh VERSION --markdown reports/VERSION.md --json >
reports/VERSION.json`.  What our own
files use of upstream changes more often than the hooks, so the findings of drift
are compared by the levels they have, not one by one.
"""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import synthetic
from patchstack import git
from patchstack.errors import StackError
from patchstack.release import fetch
from patchstack.stack import base

REPORTS = Path(__file__).with_name("reports")
VERSION = "0.32.0"
STATES = (
    "clean",
    "re-anchored",
    "resolved",
    "dropped",
    "obsolete",
    "drift",
    "conflict",
)


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    return synthetic.copy_stack(tmp_path_factory.mktemp("reports") / "repo")


def run(repo, *command):
    env = os.environ | {"PATCHSTACK_CACHE": str(fetch.cache_folder())}
    script, *options = command
    return subprocess.run(
        [repo / "scripts" / f"{script}.sh", *options],
        env=env,
        capture_output=True,
        text=True,
    )


def test_report_on_an_older_release(repo):
    try:
        fetch.find_sdist(VERSION, offline=False)
    except StackError as fault:
        pytest.skip(f"no network: {fault}")
    page = repo.parent / "report.md"
    options = ("--offline", "--json", "--markdown", str(page))
    done = run(repo, "rebase", VERSION, *options)
    assert done.returncode == 3, done.stderr
    found, kept = json.loads(done.stdout), recorded(VERSION)
    for part in ("from", "to", "state", "patches", "own", "requirements"):
        assert found[part] == kept[part], part
    assert levels(found) == levels(kept)
    kept_page = (REPORTS / f"{VERSION}.md").read_text()
    assert outline(page.read_text()) == outline(kept_page)


def recorded(version):
    return json.loads((REPORTS / f"{version}.json").read_text())


def levels(report):
    return {finding["level"] for finding in report["drift"]}


def outline(text):
    """A report up to its findings of drift."""
    return text.partition("\n### Drift")[0]


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*.json")), ids=lambda it: it.stem)
def test_reports_keep_to_the_schema(path):
    found = json.loads(path.read_text())
    assert list(found) == [
        "from", "to", "state", "patches", "own", "requirements", "drift"
    ]  # fmt: skip
    assert (found["from"], found["to"]) == (
        base.load(synthetic.REPO).version,
        path.stem,
    )
    for row in found["patches"]:
        assert list(row) == [
            "name", "subject", "state", "outcome", "drop_when", "range_diff", "files"
        ]  # fmt: skip
        assert row["state"] in STATES
        assert row["outcome"] in STATES
    assert all(
        list(row) == ["level", "symbol", "change", "used_by"] and row["used_by"]
        for row in found["drift"]
    )


def test_export_makes_the_tree_of_the_release(repo, tmp_path):
    """`git am` on upstream's files, against what our own and touched files are."""
    out = tmp_path / "fork.mbox"
    done = run(repo, "export", str(out), "--offline")
    assert done.returncode == 0, done.stderr
    pins = base.load(repo)
    sdist = fetch.fetch(pins.sdist, offline=True)
    clone = tmp_path / "clone"
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (tmp_path / "sdist" / f"vllm-{pins.version}").rename(clone)
    shutil.rmtree(clone / "vllm.egg-info")
    # Built, and hidden by upstream's ignore file: in no clone.
    (clone / "vllm" / "_version.py").unlink()
    released = files(clone)
    who = {"NAME": "Ada", "EMAIL": "ada@example.org"}
    env = git.clean_environment()
    env |= {
        f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in who.items()
    }
    commit, am = ("commit", "-qm", "release"), ("am", "-q", str(out))
    for command in (("init", "-q"), ("add", "-Af"), commit, am):
        subprocess.run(["git", *command], cwd=clone, env=env, check=True)

    done = run(repo, "apply", "--offline")
    assert done.returncode == 0, done.stderr
    made, applied = files(clone), files(repo / "vllm")
    assert made == {path: applied[path] for path in made}
    changed = {path for path in made if made[path] != released.get(path)}
    loaded = synthetic.stack.load(repo)
    assert changed == loaded.touched.union(loaded.own)
    shutil.rmtree(clone)
    shutil.rmtree(repo)


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts[:1]
    }
