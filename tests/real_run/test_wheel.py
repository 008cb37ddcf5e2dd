"""wheel.sh: a wheel of the fork that pip installs and that tells its stack."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import schemas
import synthetic
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename

ROOT = synthetic.REPO
OTHER = "aarch64" if synthetic.MACHINE == "x86_64" else "x86_64"
FILES = {
    OTHER: {
        "vllm/_C.abi3.so": b"for the other one",
        "vllm/third_party/vendored.py": b"VENDORED = True\n",
        "vllm/third_party/other.py": b"",
    }
}


@pytest.fixture(scope="module")
def _checkout(tmp_path_factory):
    """An applied stack of one patch, with release wheels of two architectures."""
    folder = tmp_path_factory.mktemp("wheel")
    upstream = synthetic.make_upstream(folder, "9.9.0")
    checkout = synthetic.make_checkout(folder, upstream)
    package = {p: it for p, it in upstream.files.items() if p.startswith("vllm/")}
    other = folder / upstream.wheel.name.replace(synthetic.MACHINE, OTHER)
    synthetic.write_wheel(other, "9.9.0", package | FILES[OTHER])
    digest = synthetic.sha256(other.read_bytes())
    place = checkout.cache / "archives" / digest
    place.mkdir(parents=True)
    shutil.copy2(other, place)
    pins = checkout.repo / "upstream.toml"
    line = f'{OTHER} = {{ file = "{other.name}", sha256 = "{digest}" }}\n'
    text = pins.read_text().replace("[base.wheels]\n", "[base.wheels]\n" + line)
    pins.write_text(text)
    shutil.copytree(ROOT / "ci" / "fork_wheel", checkout.repo / "ci" / "fork_wheel")
    for name in ("cli.py", "distribution.py", "start.sh"):
        shutil.copy2(ROOT / "ci" / name, checkout.repo / "ci")
    shutil.copy2(ROOT / "scripts" / "wheel.sh", checkout.repo / "scripts")
    checkout.ok("apply")
    checkout.edit("vllm/layers.py", "WIDTH = 8", "WIDTH = 16")
    checkout.ok("refresh", "wide-layers", *synthetic.header("Widen the layers"))
    checkout.commit()
    return checkout


@pytest.fixture
def checkout(_checkout, tmp_path):
    return _checkout.copy(tmp_path / "stacked")


def packed(checkout, *args):
    """What a run says as JSON, and the wheel's files."""
    facts = json.loads(checkout.ok("wheel", "--json", "--offline", *args))
    schemas.conforming("wheel.v1", facts)
    wheel = Path(facts["wheel"])
    data = wheel.read_bytes()
    assert facts["sha256"] == hashlib.sha256(data).hexdigest()
    assert facts["bytes"] == len(data)
    files = contents(wheel)
    assert facts["files"] == len(files)
    return facts, files


def contents(wheel):
    """The files of a wheel, whose RECORD must tell them and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert len(names) == len(set(names))
        files = {name: archive.read(name) for name in names}
        no_gaps(archive)
    (record,) = (name for name in names if name.endswith("/RECORD"))
    assert names[-1] == record
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(files[record].decode()))}
    assert rows.pop(record) == ["", ""]
    assert rows.keys() == files.keys() - {record}
    for name, (digest, size) in rows.items():
        assert digest.startswith("sha256=")
        assert "=" not in digest[7:]
        expected = hashlib.sha256(files[name]).hexdigest()
        padded = digest[7:] + "=" * (-len(digest[7:]) % 4)
        assert base64.urlsafe_b64decode(padded).hex() == expected
        assert int(size) == len(files[name])
    return files


def no_gaps(archive):
    """Every byte before the directory is of a member: nothing hides in the file."""
    at = 0
    for member in archive.infolist():
        assert member.header_offset == at
        archive.fp.seek(at + 26)
        name, extra = (int.from_bytes(archive.fp.read(2), "little") for _ in "12")
        at += 30 + name + extra + member.compress_size
        if member.flag_bits & 8:
            # A data descriptor, with or without its signature.
            archive.fp.seek(at)
            at += 16 if archive.fp.read(4) == b"PK\x07\x08" else 12
    assert at == archive.start_dir


def test_it_is_the_tree_s_package(checkout):
    facts, files = packed(checkout)
    tree = {
        path.relative_to(checkout.tree).as_posix(): path.read_bytes()
        for path in (checkout.tree / "vllm").rglob("*")
        if path.is_file()
    }
    assert {it: d for it, d in files.items() if it.startswith("vllm/")} == tree
    assert files["vllm/layers.py"].startswith(b"WIDTH = 16")
    assert Path(facts["wheel"]).parent == checkout.repo / "dist"
    name, version, _, tags = parse_wheel_filename(Path(facts["wheel"]).name)
    assert (name, str(version)) == ("vllm", "9.9.0+ours.1")
    wheel = files["vllm-9.9.0+ours.1.dist-info/WHEEL"].decode()
    assert {f"Tag: {tag}" for tag in tags} == {
        line for line in wheel.splitlines() if line.startswith("Tag:")
    }


def test_the_same_stack_gives_the_same_bytes(checkout, tmp_path):
    first, _ = packed(checkout)
    again, _ = packed(checkout)
    assert again == first
    # In another place, from files of another time.
    moved = checkout.copy(tmp_path / "moved")
    for path in (moved.tree / "vllm").rglob("*.py"):
        os.utime(path, (0, 0))
    other, _ = packed(moved, "--out", str(tmp_path / "a folder"))
    assert other["sha256"] == first["sha256"]


def test_another_architecture_has_its_own_binaries(checkout):
    here, ours = packed(checkout)
    there, theirs = packed(checkout, "--arch", OTHER)
    assert there["wheel"].endswith(f"_{OTHER}.whl")
    for path, data in FILES[OTHER].items():
        assert theirs[path] == data
    differing = {it for it in ours.keys() | theirs if ours.get(it) != theirs.get(it)}
    assert {it for it in differing if it.startswith("vllm/")} == {
        "vllm/_C.abi3.so",
        "vllm/third_party/other.py",
    }
    marker = json.loads(theirs[".stack.json"])
    assert marker["machine"] == OTHER
    assert marker["wheel_files"] == len(FILES[OTHER])
    assert json.loads(ours[".stack.json"])["wheel_files"] == len(synthetic.WHEEL_ONLY)
    assert here["stack"] == there["stack"] == marker["identity"]


def test_the_marker_tells_the_stack(checkout):
    facts, files = packed(checkout)
    status = json.loads(checkout.ok("status", "--json"))
    assert facts["stack"] == status["identity"]
    marker = json.loads(files[".stack.json"])
    assert marker["digest"] == status["stack"]
    assert set(marker["files"]) == {
        "vllm/_version.py",
        "vllm/layers.py",
        "vllm/ours.py",
    }
    for path, digest in marker["files"].items():
        assert hashlib.sha256(files[path]).hexdigest() == digest


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("vllm/engine.py", "vllm/ has local edits (changed: vllm/engine.py)"),
        ("vllm/_C.abi3.so", "vllm/ has local edits (changed binaries: "),
        ("vllm/ours.py", "own files were edited since scripts/apply.sh (vllm/ours.py)"),
    ],
)
def test_an_edited_tree_is_not_packed(checkout, path, says):
    with (checkout.tree / path).open("ab") as file:
        file.write(b"EDITED = True\n")
    fault = checkout.fails("wheel", code=2)
    assert fault.startswith("nothing is packed: ")
    assert says in fault
    assert not (checkout.repo / "dist").exists()


def test_a_tree_of_another_stack_is_not_packed(checkout):
    patch = checkout.patch("wide-layers.patch")
    patch.write_bytes(patch.read_bytes().replace(b"it is needed", b"8 is too few"))
    assert "made from another stack: run scripts/apply.sh" in checkout.fails(
        "wheel", code=2
    )
    checkout.ok("apply", "--unapply")
    assert "is not applied: run scripts/apply.sh" in checkout.fails("wheel", code=2)


def test_an_unknown_architecture(checkout):
    assert checkout.fails("wheel", "--arch", "riscv64", code=2).startswith(
        "no release wheel for 'riscv64': vLLM 9.9.0 has "
    )


def test_a_failure_leaves_the_wheel_of_before(checkout):
    facts, _ = packed(checkout)
    # A folder that cannot take a file.
    (checkout.repo / "file").write_text("")
    fault = checkout.fails("wheel", "--out", str(checkout.repo / "file"), code=2)
    assert fault.startswith(f"{checkout.repo / 'file'}: ")
    shutil.rmtree(checkout.cache)
    assert "is not in the cache" in checkout.fails("wheel", "--offline", code=2)
    left = list((checkout.repo / "dist").iterdir())
    assert left == [Path(facts["wheel"])]
    assert hashlib.sha256(left[0].read_bytes()).hexdigest() == facts["sha256"]


def test_help_names_the_schema(checkout):
    assert "docs/schemas/wheel.v1.json" in checkout.ok("wheel", "--help")


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


def install(folder):
    """Pack the real stack and let pip install it where nothing else is."""
    done = run(ROOT / "scripts" / "wheel.sh", "--json", "--out", folder)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert run(sys.executable, "-m", "venv", folder / "env").returncode == 0
    python = folder / "env" / "bin" / "python"
    options = ("--no-deps", "--no-compile", "--no-index", "-q")
    done = run(python, "-m", "pip", "install", *options, facts["wheel"])
    assert done.returncode == 0, done.stderr
    return facts, python, next((folder / "env").glob("lib/*/site-packages"))


def test_the_real_wheel(tmp_path):
    facts, python, site = install(tmp_path)
    (packed,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert packed.version == facts["version"]
    is_what_the_tree_says(packed, importlib.metadata.distribution("vllm"))
    # So that pip takes it away again.
    assert site / ".stack.json" in {it.locate() for it in packed.files}

    # The packages that it imports, of the tests' environment; not its vllm.
    (site / "theirs.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    script = (
        "import vllm.version, vllm.stack_identity as s;"
        "print(vllm.__file__, vllm.version.__version__, s.IDENTITY.stack)"
    )
    done = run(python, "-c", script, cwd=tmp_path)
    said = done.stdout.splitlines()[-1]
    expected = site / "vllm" / "__init__.py"
    assert said == f"{expected} {facts['version']} {facts['stack']}", done.stderr
    doctor_tells_it(python, site, facts["stack"])


def is_what_the_tree_says(packed, editable):
    """What pip would install with the wheel is what it would with the tree."""
    assert packed.version == editable.version
    assert set(packed.metadata) == set(editable.metadata) - {"Dynamic"}
    versions = {
        SpecifierSet(it.metadata["Requires-Python"]) for it in (packed, editable)
    }
    assert len(versions) == 1
    for field in set(packed.metadata) - {"Requires-Dist", "Requires-Python"}:
        assert packed.metadata.get_all(field) == editable.metadata.get_all(field), field
    needed = [[Requirement(line) for line in it.requires] for it in (packed, editable)]
    assert needed[0] == needed[1]
    points = {(it.group, it.name, it.value) for it in packed.entry_points}
    assert points == {(it.group, it.name, it.value) for it in editable.entry_points}


def doctor_tells_it(python, site, stack):
    """An installed wheel is whole, edited, or of another stack."""

    def doctor():
        done = run(ROOT / "scripts" / "doctor.sh", "--python", python, "--json")
        found = schemas.conforming("doctor.v1", json.loads(done.stdout))
        return found["facts"]["identity"], of_the_package(found["faults"])

    assert doctor() == (stack, [])
    (site / "vllm" / "stack_identity.py").open("a").write("EDITED = True\n")
    library = next(site.glob("vllm/*.so"))
    library.write_bytes(b"another build")
    remedy = "install the wheel that scripts/wheel.sh makes now"
    faults = [
        "edited since it was installed (vllm/stack_identity.py), so an engine reports "
        f"{stack}+edited: {remedy}",
        f"vllm/{library.name} differ from the release wheel: {remedy}",
    ]
    assert doctor() == (stack + "+edited", faults)
    marker = json.loads((site / ".stack.json").read_text())
    (site / ".stack.json").write_text(json.dumps(marker | {"digest": "f" * 64}))
    other = f"{site} was packed from another stack ({stack}): {remedy}"
    assert doctor() == (stack + "+edited", [other, *faults])


def of_the_package(faults):
    """Faults of the package itself, not of what the tests' environment lacks."""
    return [
        it
        for it in faults
        if not it.startswith(("not installed: ", "there is a GPU"))
        and "vllm needs" not in it
    ]
