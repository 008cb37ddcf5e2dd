"""Release files from the package index, through a cache keyed by content."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .base import Archive, file_sha256
from .errors import StackError
from .progress import PERIOD_S, note

_TOOL = Path(__file__).with_name("unearth.txt")


def cache_folder() -> Path:
    named = os.environ.get("PATCHSTACK_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(home).expanduser() / "vllm-patchstack"
    except RuntimeError:
        # A user that the system does not know, as in a container.
        raise StackError(
            "HOME is not set, so there is no place for the cache: set PATCHSTACK_CACHE "
            "to a folder of yours"
        ) from None


def fetch(archive: Archive, version: str, offline: bool) -> Path:
    """The pinned file, from the cache or the index; its content is verified."""
    folder = cache_folder() / "archives" / archive.sha256
    place = folder / archive.file
    if place.is_file():
        if file_sha256(place) == archive.sha256:
            return place
        note(f"dropped {place}: its content is not what upstream.toml pins")
        place.unlink()
    if offline:
        raise StackError(
            f"{archive.file} is not in the cache ({cache_folder()}): run once without "
            f"--offline, or give the file ({_option(archive)} FILE)"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            fetched = _download(archive, version, Path(temporary))
            verify(fetched, archive)
            fetched.replace(place)
    except OSError as fault:
        if fault.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise StackError(
            f"cannot write to the cache: {fault}: set PATCHSTACK_CACHE to a folder "
            "of yours"
        ) from None
    return place


def find_sdist(version: str, offline: bool) -> Path:
    """The sdist of a release that is not pinned, from the cache or the index."""
    name = f"vllm-{version}.tar.gz"
    cached = _cached(name)
    if cached is not None:
        return fetch(cached, version, offline)
    if offline:
        raise StackError(
            f"{name} is not in the cache ({cache_folder()}): run once without "
            "--offline, or give the file (--from FILE)"
        )
    return fetch(_pinned(name, version, offers(version)), version, offline)


def find_wheel(version: str, machine: str, offline: bool) -> Archive:
    """Name and content of a release's wheel; fetched only if the index is silent."""
    tail = f"_{machine}.whl"
    cached = _cached(f"vllm-{version}-*{tail}")
    if cached is not None:
        return cached
    if offline:
        raise StackError(
            f"the wheel of vLLM {version} for {machine} is not in the cache "
            f"({cache_folder()}): run once without --offline"
        )
    offered = offers(version)
    names = sorted(name for name in offered if name.endswith(tail))
    if len(names) != 1:
        raise StackError(
            f"the package index has {len(names)} wheels of vLLM {version} for "
            f"{machine}, one is needed: drop {machine} from [base.wheels] in "
            "upstream.toml, or choose another release"
        )
    return _pinned(names[0], version, offered)


def newest() -> str:
    """Version of the newest release that has an sdist on the index."""
    # The index names the newest first.
    sdists = [name for name in offers() if name.endswith(".tar.gz")]
    if not sdists:
        raise StackError("the package index has no sdist of vLLM: check its settings")
    return sdists[0].removeprefix("vllm-").removesuffix(".tar.gz")


def offers(version: str | None = None) -> dict[str, str | None]:
    """File names of a release on the index, each with its sha256 where stated."""
    python = downloader()
    wanted = f"vllm=={version}" if version else "vllm"
    note(f"asking the package index for {wanted}")
    done = _run([python, "-c", _OFFERS, wanted, json.dumps(_index_settings(python))])
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no answer"]
        raise StackError(
            f"cannot ask the package index for {wanted}: {lines[-1]}: check the "
            "network or pip's index settings"
        )
    found: dict[str, str | None] = json.loads(done.stdout)
    if not found:
        raise StackError(
            f"the package index has no {wanted}: check the version, the network or "
            "pip's index settings, or give the release (--from FILE|DIR|GIT-URL@TAG)"
        )
    return found


_OFFERS = """
import json, sys
from unearth import PackageFinder
settings = json.loads(sys.argv[2])
finder = PackageFinder(
    index_urls=settings["--index-url"],
    find_links=settings["--find-link"],
    trusted_hosts=settings["--trusted-host"],
    ignore_compatibility=True,
)
links = [it.link for it in finder.find_matches(sys.argv[1])]
print(json.dumps({it.filename: (it.hashes or {}).get("sha256") for it in links}))
"""


def _cached(pattern: str) -> Archive | None:
    """The one archive in the cache of that name; two contents count for none."""
    found = sorted(cache_folder().glob(f"archives/*/{pattern}"))
    if len(found) != 1:
        return None
    return Archive(found[0].name, found[0].parent.name)


def _pinned(name: str, version: str, offered: dict[str, str | None]) -> Archive:
    if name not in offered:
        raise StackError(
            f"the package index has no {name}: give the release "
            "(--from FILE|DIR|GIT-URL@TAG)"
        )
    digest = offered[name]
    if digest is not None:
        return Archive(name, digest)
    folder = cache_folder() / "archives"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        fetched = _download(Archive(name, ""), version, Path(temporary))
        archive = Archive(name, file_sha256(fetched))
        (folder / archive.sha256).mkdir(exist_ok=True)
        fetched.replace(folder / archive.sha256 / name)
    return archive


def verify(path: Path, archive: Archive) -> None:
    """Raise `StackError` unless the file is the pinned one."""
    found = file_sha256(path)
    if found != archive.sha256:
        raise StackError(
            f"{path} is not {archive.file}: sha256 {found[:12]}..., upstream.toml "
            f"pins {archive.sha256[:12]}...: fetch it again"
        )


def _option(archive: Archive) -> str:
    return "--wheel" if archive.file.endswith(".whl") else "--from"


def _download(archive: Archive, version: str, into: Path) -> Path:
    python = downloader()
    command = [*selection(python, archive, version), "-d", str(into)]
    note(f"fetching {archive.file}")
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=_downloader_environment(),
        )
        try:
            while process.poll() is None:
                _report_growth(process, archive, into)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise StackError(
                f"cannot fetch {archive.file}: {lines[-1] if lines else 'no answer'}: "
                f"check the network or pip's index settings, or give the file "
                f"({_option(archive)} FILE)"
            )
    fetched = into / archive.file
    if not fetched.is_file():
        raise StackError(
            f"the package index gave another file than {archive.file}: check its "
            f"settings, or give the file ({_option(archive)} FILE)"
        )
    return fetched


def selection(python: Path, archive: Archive, version: str) -> list[str]:
    """Command that finds the archive on the index; the caller says what to do."""
    command = [str(python), "-m", "unearth", f"vllm=={version}"]
    if archive.file.endswith(".whl"):
        # The wheel of another architecture is as good to fetch as our own.
        _, abi, platforms = archive.file.removesuffix(".whl").rsplit("-", 2)
        command += ["--only-binary", "--platforms", platforms.replace(".", ",")]
        command += ["--abis", abi.replace(".", ",")]
    else:
        command += ["--no-binary"]
    return command + _index_options(python)


def _report_growth(
    process: subprocess.Popen[bytes], archive: Archive, into: Path
) -> None:
    deadline = time.monotonic() + PERIOD_S
    while time.monotonic() < deadline:
        try:
            process.wait(0.05)
            return
        except subprocess.TimeoutExpired:
            pass
    size = sum(file.stat().st_size for file in into.rglob("*") if file.is_file())
    note(f"fetching {archive.file}: {size >> 20} MiB")


def downloader() -> Path:
    """Python of a private environment that has the downloader, made once."""
    key = file_sha256(_TOOL)[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = cache_folder() / "tools" / f"unearth-{key}-py{version}"
    if (place / "bin" / "python").exists():
        return place / "bin" / "python"
    note("making the downloader's environment")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".making-") as temporary:
        made = Path(temporary) / "env"
        _make_downloader(made)
        if not (place / "bin" / "python").exists():
            # One whose Python has since gone from the machine makes way.
            shutil.rmtree(place, ignore_errors=True)
        # Another run may have been quicker; the two are the same.
        with suppress(OSError):
            made.rename(place)
    return place / "bin" / "python"


def _make_downloader(place: Path) -> None:
    by_hand = "or give the files: scripts/apply.sh --from SDIST --wheel WHEEL"
    try:
        venv.create(place, with_pip=True, symlinks=True)
    except (subprocess.CalledProcessError, OSError):
        raise StackError(
            f"{sys.executable} cannot make a virtual environment: install its venv "
            f"and pip modules (python3-venv), {by_hand}"
        ) from None
    # Dependencies are all pinned: the resolver has nothing to decide.
    install = ["-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
    done = _run([place / "bin" / "python", *install, "-r", _TOOL])
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise StackError(
            f"cannot install the downloader: {lines[-1]}: check the network or pip's "
            f"index settings, {by_hand}"
        )


def _index_options(python: Path) -> list[str]:
    return [
        part
        for key, values in _index_settings(python).items()
        for value in values
        for part in (key, value)
    ]


def _index_settings(python: Path) -> dict[str, list[str]]:
    """pip's own settings, so that a private mirror set up for pip serves us too."""
    done = _run([python, "-m", "pip", "config", "list"])
    settings: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        scope, _, key = name.rpartition(".")
        # pip's order of precedence: the environment comes last and wins.
        if scope in ("global", "download", ":env:"):
            settings[key] = value.strip("'\"").split()
    indexes = settings.get("index-url", []) + settings.get("extra-index-url", [])
    # The downloader forgets its default index where it is given any source.
    if settings and "index-url" not in settings:
        indexes.insert(0, _default_index(python))
    return {
        "--index-url": indexes,
        "--find-link": settings.get("find-links", []),
        "--trusted-host": settings.get("trusted-host", []),
    }


def _default_index(python: Path) -> str:
    command = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    done = _run([python, "-c", command])
    done.check_returncode()
    return done.stdout.strip()


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a command of the downloader's Python, whatever it exits with."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=_downloader_environment(),
    )


def _downloader_environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if "PIP_CERT" in env:
        env.setdefault("SSL_CERT_FILE", env["PIP_CERT"])
    return env
