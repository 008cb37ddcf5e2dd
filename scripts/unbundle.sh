#!/usr/bin/env bash
# Unpack a bundle made by bundle.sh. Needs bash and python3 alone. See --help.
set -euo pipefail
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "unbundle.sh: Python 3.11 or newer is needed: set PYTHON to one" >&2
    exit 1
fi
exec "$python" - "$@" <<'PYTHON'
"""Check the parts of a bundle, unpack them and print the environment to use."""

import argparse
import hashlib
import io
import json
import platform
import shlex
import sys
import tarfile
import time
from pathlib import Path

FORMAT = 1
ENVIRONMENT = {
    # FlashInfer's kernel sources are not carried, so its sampler cannot compile.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # There is no network to ask.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class UnbundleError(Exception):
    """Something the user can put right; its text is one line."""


class Parts(io.RawIOBase):
    """The parts of an archive, read as the one file they were cut from."""

    def __init__(self, paths):
        self._paths = list(paths)
        self._file = None

    def readable(self):
        return True

    def readinto(self, buffer):
        while True:
            if self._file is None:
                if not self._paths:
                    return 0
                self._file = self._paths.pop(0).open("rb")
            count = self._file.readinto(buffer)
            if count:
                return count
            self._file.close()
            self._file = None


def say(text):
    print(text, file=sys.stderr, flush=True)


def read_manifests(folder):
    """The manifests below ``folder`` by archive; two that differ are an error."""
    manifests = {}
    for path in sorted(folder.rglob("*.bundle.json")):
        manifest = json.loads(path.read_text())
        if manifest.get("format") != FORMAT:
            raise UnbundleError(f"{path}: another unbundle.sh made for this is needed")
        known = manifests.setdefault(manifest["archive"], manifest)
        if known != manifest:
            raise UnbundleError(
                f"{folder} holds parts of two bundles of {manifest['archive']}: "
                "remove the older ones"
            )
    if not manifests:
        raise UnbundleError(f"{folder} holds no part of a bundle")
    for archive in ("packages", "upstream", "fork"):
        if archive not in manifests:
            raise UnbundleError(f"no part of the archive '{archive}' is in {folder}")
    return manifests


def find_parts(folder, manifest):
    """Paths of the archive's parts, in order, each one checked."""
    paths = []
    missing = []
    for part in manifest["parts"]:
        found = next(iter(sorted(folder.rglob(part["name"]))), None)
        if found is None:
            missing.append(f"{part['folder']}/{part['name']}")
            continue
        with found.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != part["sha256"]:
            raise UnbundleError(f"{found} is damaged (sha256 differs): send it again")
        paths.append(found)
    if missing:
        raise UnbundleError(f"missing in {folder}: {', '.join(missing)}; send them too")
    return paths


def stamp_of(manifest, prefix):
    """Where an unpacked archive is noted, with what it holds."""
    return prefix / ".bundle" / f"{manifest['archive']}.json"


def clear(manifest, prefix, force):
    """Remove an older one of the archive; whether this one is to be unpacked."""
    stamp = stamp_of(manifest, prefix)
    old = json.loads(stamp.read_text()) if stamp.exists() else {"names": []}
    if old.get("inputs") == manifest["inputs"] and not force:
        say(f"{manifest['archive']}: already unpacked")
        return False
    # Without its stamp an interrupted unpack is done again.
    stamp.unlink(missing_ok=True)
    for name in old["names"]:
        (prefix / name).unlink(missing_ok=True)
    return True


def unpack(manifest, paths, prefix):
    """Unpack one archive below ``prefix``."""
    started = time.monotonic()
    say(f"{manifest['archive']}: unpacking {manifest['files']} files")
    # The archive has no times. Bytecode is known to be stale by its source's time.
    now = time.time()
    names = []
    whole = io.BufferedReader(Parts(paths), 1 << 20)
    with tarfile.open(fileobj=whole, mode="r|xz") as tar:
        for member in tar:
            member.mtime = now
            tar.extract(member, prefix, filter="data")
            names.append(member.name)
    stamp = stamp_of(manifest, prefix)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(json.dumps({"inputs": manifest["inputs"], "names": names}))
    say(f"{manifest['archive']}: {time.monotonic() - started:.0f} s")


def environment(prefix):
    """Shell lines that make the unpacked fork the one that python3 imports."""
    path = f"{prefix / 'fork'}:{prefix / 'site'}"
    yield f"export PYTHONPATH={shlex.quote(path)}${{PYTHONPATH:+:$PYTHONPATH}}"
    yield f"export VLLM_BUNDLE={shlex.quote(str(prefix))}"
    for name, value in ENVIRONMENT.items():
        yield f"export {name}={value}"


def main():
    parser = argparse.ArgumentParser(
        prog="unbundle.sh",
        description="Unpack a bundle. Prints the environment to use on standard "
        'output: eval "$(unbundle.sh --prefix DIR)".',
    )
    parser.add_argument("--prefix", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--parts",
        type=Path,
        default=Path(".bundle"),
        metavar="DIR",
        help="where the parts are, at any depth (default: .bundle)",
    )
    parser.add_argument(
        "--force", action="store_true", help="unpack again what is already there"
    )
    options = parser.parse_args()
    if not options.parts.is_dir():
        raise UnbundleError(f"--parts {options.parts}: there is no such folder")
    prefix = options.prefix.absolute()
    manifests = read_manifests(options.parts)
    python = manifests["packages"]["python"]
    here = ".".join(platform.python_version_tuple()[:2])
    if python != here:
        raise UnbundleError(f"the bundle is for Python {python}, this is {here}")
    checked = [(m, find_parts(options.parts, m)) for m in manifests.values()]
    # All older ones first: a file may have moved from one archive to another.
    wanted = [(m, paths) for m, paths in checked if clear(m, prefix, options.force)]
    for manifest, paths in wanted:
        unpack(manifest, paths, prefix)
    print("\n".join(environment(prefix)))


try:
    main()
except UnbundleError as error:
    sys.exit(f"unbundle.sh: {error}")
except OSError as error:
    sys.exit(f"unbundle.sh: {error.filename}: {error.strerror}")
except (ValueError, KeyError, tarfile.TarError) as error:
    sys.exit(f"unbundle.sh: the bundle cannot be read ({error}): pack it again")
except KeyboardInterrupt:
    sys.exit("unbundle.sh: stopped; run it again")
PYTHON
