"""The workflow files call what is there."""

import re
import subprocess

import pytest
import synthetic
import yaml

WORKFLOWS = sorted((synthetic.REPO / ".github" / "workflows").glob("*.yml"))


def runs(workflow):
    """Commands of all steps, with the values of a job's matrix filled in."""
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            command = step.get("run", "")
            found = re.search(r"\$\{\{ matrix\.(\w+) \}\}", command)
            for value in matrix[found[1]] if found else [None]:
                yield command.replace(found[0], value) if found else command


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_and_parts_exist(workflow):
    usage = subprocess.check_output(
        [synthetic.REPO / "scripts" / "test.sh", "--help"], text=True
    )
    parts = set(re.findall(r"^  (\w+) ", usage, re.MULTILINE))
    called = 0
    for command in runs(workflow):
        for script in re.findall(r"(?:scripts|ci)/[\w.]+", command):
            assert (synthetic.REPO / script).is_file(), script
            called += 1
        for part in re.findall(r"scripts/test\.sh (\w+)", command):
            assert part in parts
    assert called


def test_every_part_that_needs_no_gpu_is_checked():
    check = next(path for path in WORKFLOWS if path.name == "check.yml")
    usage = subprocess.check_output(
        [synthetic.REPO / "scripts" / "test.sh", "--help"], text=True
    )
    parts = set(re.findall(r"^  (\w+) ", usage, re.MULTILINE))
    tested = {
        part
        for command in runs(check)
        for part in re.findall(r"scripts/test\.sh (\w+)", command)
    }
    assert tested == parts - {"gpu"}
