"""The package and the patch-stack tool tell the same identity."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from patchstack.files import file_sha256
from patchstack.tree import identity, marker
from patchstack.tree.marker import Marker
from vllm import stack_identity
from vllm.stack_identity import UNKNOWN, StackIdentity
from vllm.version import __version__

REPO = Path(__file__).resolve().parents[2]
TEXTS = {"vllm/ours.py": "OURS = True\n", "vllm/patched.py": "WIDTH = 16\n"}


@pytest.fixture
def applied(tmp_path):
    """A tree as apply leaves it."""
    for path, text in TEXTS.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    files = {path: file_sha256(tmp_path / path) for path in TEXTS}
    facts = {name: "" for name in Marker.__dataclass_fields__}
    name = identity.name("0123456789abcdef", files)
    made = Marker(**facts | {"base": "9.9.0", "identity": name, "files": files})
    marker.write(tmp_path, made)
    return tmp_path


def both(folder):
    """The identity by the package, which must be the tool's too."""
    found = stack_identity.read(folder)
    assert found.stack == identity.reported(folder, marker.read(folder))
    return found


def test_as_applied(applied):
    found = both(applied)
    assert found.base == "9.9.0"
    assert found.version == __version__
    assert found.edited == ()
    stack, content = found.stack.split(".")
    assert stack == "0123456789ab"
    assert len(content) == 12


@pytest.mark.parametrize("path", TEXTS)
def test_an_edit_shows(applied, path):
    clean = both(applied).stack
    (applied / path).write_text("EDITED = True\n")
    found = both(applied)
    assert found.stack == clean + "+edited"
    assert found.edited == (path,)
    (applied / path).unlink()
    assert both(applied) == found
    (applied / path).write_text(TEXTS[path])
    assert both(applied).stack == clean


def test_the_content_has_a_part_in_the_name():
    names = {
        identity.name("abc", files)
        for files in ({}, {"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": "1"})
    }
    assert len(names) == 5


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"base": "9.9.0", "identity": "a.b", "files": 1}',
        b"\xff",
    ],
)
def test_no_usable_marker_is_unknown(tmp_path, text):
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / stack_identity.MARKER).write_bytes(data)
    found = stack_identity.read(tmp_path)
    assert found == StackIdentity(UNKNOWN, UNKNOWN, __version__)


def test_a_marker_of_an_older_tool_is_unknown(applied):
    old = asdict(marker.read(applied))
    del old["identity"], old["files"]
    (applied / marker.MARKER).write_text(json.dumps(old))
    assert both(applied).stack == UNKNOWN


def test_status_names_what_the_package_reports():
    out = subprocess.check_output([REPO / "scripts/status.sh", "--json"], text=True)
    assert json.loads(out)["identity"] == stack_identity.read(REPO / "vllm").stack
    assert stack_identity.MARKER == marker.MARKER
