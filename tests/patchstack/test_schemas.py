"""Every `--json` output keeps to its documented schema, and no schema is loose."""

import json
import re
import sys

import jsonschema
import pytest
import schemas
import synthetic
import write_schemas


def printed(checkout, name, command, *args, code=0):
    """The JSON of a run, which must keep to the schema."""
    done = checkout.run(command, *args, "--json")
    assert done.returncode == code, (done.stdout, done.stderr)
    return schemas.conforming(name, json.loads(done.stdout))


def test_apply(stacked):
    assert printed(stacked, "apply.v1", "apply")["state"] == "unchanged"
    assert printed(stacked, "apply.v1", "apply", "--check")["fault"] is None
    for state in ("unapplied", "unchanged"):
        found = printed(stacked, "apply.v1", "apply", "--unapply")
        assert found["state"] == state
        assert "base" not in found
    assert printed(stacked, "apply.v1", "apply", "--check", code=1)["fault"]
    assert printed(stacked, "apply.v1", "apply")["state"] == "applied"
    patch = stacked.patch("step-by-two.patch")
    patch.write_bytes(patch.read_bytes().replace(b"it is needed", b"steps are odd"))
    assert printed(stacked, "apply.v1", "apply")["state"] == "adopted"


def test_refresh_and_export(stacked, tmp_path):
    stacked.edit("vllm/layers.py", "16", "32")
    assert printed(stacked, "refresh.v1", "refresh")["done"]
    assert printed(stacked, "refresh.v1", "refresh")["done"] == []
    stacked.commit()
    assert printed(stacked, "export.v1", "export", str(tmp_path / "out"))["mails"] == 4


def test_status(bare, stacked):
    assert printed(bare, "status.v1", "status")["applied"] is None
    stacked.edit("vllm/dos.py", "A = 1", "A = 2")
    (stacked.tree / "new").write_text("")
    (stacked.tree / "README.md").unlink()
    (stacked.tree / "vllm" / "_C.abi3.so").unlink()
    (stacked.tree / "vllm" / "ours.py").unlink()
    assert all(printed(stacked, "status.v1", "status")["edits"].values())
    assert printed(stacked, "status-check.v1", "status", "--check", code=1)["faults"]


def test_doctor(stacked):
    python = ("--python", sys.executable)
    found = printed(stacked, "doctor.v1", "doctor", *python, code=1)
    assert found["faults"]


def test_rebase(stacked, tmp_path):
    text = synthetic.ENGINE.replace("return step\n", "return -step\n", 1)
    newer = synthetic.make_upstream(tmp_path, "9.10.0", {"vllm/engine.py": text})
    stacked.offer(newer)
    found = printed(stacked, "rebase.v1", "rebase", "9.10.0", code=3)
    assert found["patches"][0]["files"][0]["hunks"]
    drop = ("--continue", "--drop", "step-by-two")
    assert printed(stacked, "rebase.v1", "rebase", *drop)["state"] == "dropped"
    found = printed(stacked, "rebase.v1", "rebase", "--accept")
    assert found["state"] == "accepted"
    stacked.commit()
    printed(stacked, "rebase.v1", "rebase", "9.9.0")
    assert printed(stacked, "rebase.v1", "rebase", "--abort") == {"state": "aborted"}


@pytest.mark.parametrize(
    "path",
    sorted(synthetic.REPO.glob("tests/patchstack/reports/*.json")),
    ids=lambda path: path.stem,
)
def test_reports_on_releases(path):
    schemas.conforming("rebase.v1", json.loads(path.read_text()))


@pytest.mark.parametrize(
    "path",
    sorted(synthetic.REPO.glob("ci/results/*/*.json")),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_recorded_results(path):
    """By the newest version or, where they are older, by that of their day."""
    day = path.parent.name[: len("2026-11-30")]
    early = day <= "2026-11-30"
    schema = {
        "metadata": "bench-metadata.v1" if early else "bench-metadata.v2",
        "smoke": "smoke.v1" if early else "smoke.v2",
        "step": "bench-step.v1",
    }[path.stem.partition("-")[0]]
    schemas.conforming(schema, json.loads(path.read_text()))


def objects(schema):
    """Every description of an object in a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for part in schema.values():
            yield from objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part)


@pytest.mark.parametrize(
    "path", sorted(schemas.FOLDER.iterdir()), ids=lambda path: path.name
)
def test_no_schema_is_loose(path):
    """A new or a lost key must break it; each file names itself and its output."""
    schema = json.loads(path.read_text())
    assert re.fullmatch(r"[a-z-]+\.v\d+", schema["$id"])
    assert path.name == f"{schema['$id']}.json"
    assert schema["title"]
    for found in objects(schema):
        assert found["additionalProperties"] is not True
        if "properties" in found:
            assert found["additionalProperties"] is False
            assert set(found["required"]) <= set(found["properties"])


@pytest.mark.parametrize(("file", "text"), write_schemas.schemas().items())
def test_schemas_are_those_of_what_is_printed(file, text):
    found = (schemas.FOLDER / file).read_text()
    assert found == text, "run python tests/patchstack/write_schemas.py"


def test_a_key_that_nobody_documented_is_noticed():
    with pytest.raises(jsonschema.ValidationError):
        schemas.conforming("export.v1", {"mails": 1, "base": "1", "more": 1})
    with pytest.raises(jsonschema.ValidationError):
        schemas.conforming("export.v1", {"mails": 1})


@pytest.mark.parametrize(
    "command", ["apply", "refresh", "status", "doctor", "rebase", "export"]
)
def test_help_names_the_schema(bare, command):
    assert f"docs/schemas/{command}.v1.json" in bare.ok(command, "--help")
