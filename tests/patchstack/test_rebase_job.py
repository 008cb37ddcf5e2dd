"""`ci/rebase`: what the scheduled job writes for each end of a rebase."""

import os
import shutil
import subprocess
import sys

import pytest
import synthetic

REBASE = """\
#!/bin/sh
echo "$@" >"$(dirname "$0")/called"
[ -n "$REPORT" ] && echo "# Report" >"$4"
echo '{"state": "x"}'
exit $CODE
"""
# Answers for pip's index; everything else is the real interpreter's.
PYTHON = """\
#!/bin/sh
if [ "$2" = pip ]; then echo "$NEWEST"; exit; fi
exec {python} "$@"
"""


@pytest.fixture
def job(tmp_path):
    repo = tmp_path / "a repo"
    for folder in ("ci", "scripts", "bin"):
        (repo / folder).mkdir(parents=True)
    shutil.copy2(synthetic.REPO / "ci" / "rebase", repo / "ci")
    (repo / "upstream.toml").write_text('[base]\nversion = "9.9.0"\n')
    for path, text in (
        ("scripts/rebase.sh", REBASE),
        ("bin/python3", PYTHON.format(python=sys.executable)),
    ):
        (repo / path).write_text(text)
        (repo / path).chmod(0o755)

    def run(*args, code=0, report="yes", newest="vllm (9.9.1)"):
        env = os.environ | {
            "PATH": f"{repo / 'bin'}:{os.environ['PATH']}",
            "CODE": str(code),
            "REPORT": report,
            "NEWEST": newest,
        }
        done = subprocess.run(
            [repo / "ci" / "rebase", *args], env=env, capture_output=True, text=True
        )
        return done, repo

    return run


def state(repo):
    return (repo / ".rebase-report" / "state").read_text()


def test_nothing_is_newer(job):
    done, repo = job(newest="vllm (9.9.0)")
    assert done.returncode == 0
    assert done.stdout == "the stack is for vLLM 9.9.0, the newest release\n"
    assert state(repo) == "current\n"
    assert not (repo / "scripts" / "called").exists()


def test_a_release_that_the_stack_fits(job):
    done, repo = job()
    assert done.returncode == 0
    assert state(repo) == "ready 9.9.1\n"
    out = repo / ".rebase-report"
    assert (repo / "scripts" / "called").read_text() == (
        f"9.9.1 --json --markdown {out}/report.md\n"
    )
    assert (out / "report.json").read_text() == '{"state": "x"}\n'
    assert (out / "report.md").read_text() == "# Report\n"


@pytest.mark.parametrize("report", ["yes", ""])
def test_a_release_that_needs_a_person(job, report):
    done, repo = job("--version", "9.8.0", code=3, report=report)
    assert done.returncode == 3
    assert state(repo) == "attention 9.8.0 3\n"
    text = (repo / ".rebase-report" / "report.md").read_text()
    assert text == (
        "# Report\n"
        if report
        else "scripts/rebase.sh 9.8.0 ended with code 3 and no report.\n"
    )


def test_the_folder_is_the_callers(job, tmp_path):
    job("--out", str(tmp_path / "there"))
    assert (tmp_path / "there" / "state").read_text() == "ready 9.9.1\n"


@pytest.mark.parametrize(
    ("args", "newest", "message"),
    [
        (["--nonsense"], "", "unknown option '--nonsense'; see --help"),
        (["--out"], "", "--out needs a value; see --help"),
        ([], "", "pip index versions vllm gives no version: check the index"),
    ],
)
def test_errors(job, args, newest, message):
    done, repo = job(*args, newest=newest)
    assert done.returncode == 2
    assert done.stderr == f"error: {message}\n"
    assert not (repo / ".rebase-report").exists()
