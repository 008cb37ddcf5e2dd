"""A small upstream and checkouts of small stacks on it."""

import base64
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from patchstack import stack
from patchstack.stack import base, own

REPO = Path(__file__).resolve().parents[2]
MACHINE = platform.machine()
UNREACHABLE = "http://127.0.0.1:9/simple"

ENGINE = """\
def start(step):
    step = step * 2
    step = step + 0
    return step


def stop(step):
    step = step * 2
    step = step + 0
    return step


def wait(seconds):
    return seconds
"""

RELEASE = {
    ".gitignore": "*.csv\n*.so\n",
    "LICENSE": "".join(f"Clause {n}.\n" for n in range(60)),
    "PKG-INFO": "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n\nText\n",
    "README.md": "An engine.\n",
    "docs/naïve guide.md": "Read me.\n",
    "pyproject.toml": "[build-system]\nrequires = ['torch']\n",
    "setup.py": "raise SystemExit('compiles')\n",
    "tools/run.sh": "#!/bin/sh\necho run\n",
    "vllm.egg-info/PKG-INFO": "Version: {version}\n",
    "vllm/__init__.py": "from ._version import __version__\n",
    "vllm/_version.py": "__version__ = '{version}'\n",
    "vllm/dos.py": "A = 1\r\nB = 2\r\nC = 3\r\n",
    "vllm/empty/__init__.py": "",
    "vllm/engine.py": ENGINE,
    "vllm/layers.py": "WIDTH = 8\n\n\ndef layers():\n    return WIDTH\n",
}
EXECUTABLE = ("tools/run.sh",)
LINKS = {"docs/README.md": "../README.md"}
WHEEL_ONLY = {
    "vllm/_C.abi3.so": b"\x7fELF compiled \0 for " + MACHINE.encode(),
    "vllm/third_party/vendored.py": b"VENDORED = True\n",
}

OWN = {
    "pyproject.toml": (REPO / "vllm" / "pyproject.toml").read_text(),
    "stack_backend.py": (REPO / "vllm" / "stack_backend.py").read_text(),
    "vllm/_version.py": '__version__ = "9.9.0+ours.1"\n',
    "vllm/ours.py": "OURS = True\n",
}
REPLACED = (".gitignore", "pyproject.toml", "vllm/_version.py")
REMOVED = ("setup.py", "vllm.egg-info/")


@dataclass(frozen=True)
class Upstream:
    version: str
    files: dict[str, bytes]
    sdist: Path
    wheel: Path


def make_upstream(
    folder: Path, version: str, changes: dict[str, str | None] | None = None
):
    """Write sdist and wheel of a release; `changes` replaces files by path.

    A file that is changed to None is not in the release.
    """
    texts = RELEASE | (changes or {})
    files = {
        path: text.replace("{version}", version).encode()
        for path, text in texts.items()
        if text is not None
    }
    sdist = folder / f"vllm-{version}.tar.gz"
    write_sdist(sdist, f"vllm-{version}", files)
    wheel = folder / f"vllm-{version}-cp38-abi3-manylinux_2_28_{MACHINE}.whl"
    package = {path: it for path, it in files.items() if path.startswith("vllm/")}
    write_wheel(wheel, version, package | WHEEL_ONLY)
    return Upstream(version, files, sdist, wheel)


def write_sdist(path: Path, top: str, files: dict[str, bytes], links=None) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(data)
            member.mode = 0o775 if name in EXECUTABLE else 0o664
            member.uid = member.gid = 4242
            tar.addfile(member, io.BytesIO(data))
        for name, target in (LINKS if links is None else links).items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)


def write_wheel(path: Path, version: str, files: dict[str, bytes]) -> None:
    info = f"vllm-{version}.dist-info"
    record = ""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            executable = name.endswith(".so")
            member.external_attr = (0o100755 if executable else 0o100644) << 16
            archive.writestr(member, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            record += f'"{name}",sha256={digest.decode().rstrip("=")},{len(data)}\n'
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def header(subject: str) -> list[str]:
    return [
        *("--subject", subject, "--why", "it is needed", "--upstream-status", "none"),
        *("--drop-when", "tests/x.py::test_y", "--tests", "tests/x.py"),
    ]


_HOSTILE = """\
[core]
    autocrlf = true
    eol = crlf
    fsmonitor = /bin/false
    hooksPath = {hooks}
    quotePath = true
    attributesFile = {attributes}
    excludesFile = {attributes}
    fileMode = false
    symlinks = false
    ignoreCase = true
    splitIndex = true
    untrackedCache = true
    pager = false
    editor = false
    worktree = /nowhere
    bare = true
[color]
    ui = always
[feature]
    manyFiles = true
[i18n]
    commitEncoding = latin1
    logOutputEncoding = latin1
[log]
    showSignature = true
[user]
    useConfigOnly = true
[commit]
    gpgSign = true
[gpg]
    program = /bin/false
[apply]
    whitespace = fix
    ignoreWhitespace = change
[merge]
    conflictStyle = merge
[diff]
    noprefix = true
    external = /bin/false
    algorithm = patience
    context = 0
    mnemonicPrefix = true
[init]
    templateDir = {hooks}
    defaultBranch = other
[status]
    showUntrackedFiles = all
[alias]
    apply = !false
"""
_HOSTILE_VARIABLES = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.autocrlf",
    "GIT_CONFIG_VALUE_0": "true",
    "GIT_CONFIG_PARAMETERS": "'apply.whitespace=fix'",
    "GIT_DIR": "/nowhere",
    "GIT_INDEX_FILE": "/nowhere/index",
    "GIT_WORK_TREE": "/nowhere",
    "GIT_EXTERNAL_DIFF": "/bin/false",
    "GIT_AUTHOR_DATE": "2001-01-01T00:00:00",
    "GIT_COMMITTER_NAME": "Mallory",
    "GIT_OBJECT_DIRECTORY": "/nowhere/objects",
    "GIT_DIFF_OPTS": "-u0",
    "GIT_COMMON_DIR": "/nowhere",
    "GIT_DEFAULT_HASH": "sha256",
    "GIT_LITERAL_PATHSPECS": "0",
    "GIT_PAGER": "false",
    "GIT_TEMPLATE_DIR": "/nowhere",
    "GIT_TRACE": "1",
    "PAGER": "false",
    "LC_ALL": "de_DE.UTF-8",
}


def said(stderr: str) -> list[str]:
    """Lines on stderr, without those that only tell how long a step takes."""
    return [it for it in stderr.splitlines() if not re.fullmatch(r"  .*: \d+ s", it)]


@dataclass(frozen=True)
class Checkout:
    """A repository with the real tool, on a synthetic upstream."""

    repo: Path
    upstream: Upstream
    cache: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> Path:
        return self.repo / "vllm"

    def copy(self, folder: Path) -> "Checkout":
        repo = folder / "a checkout, kopië"
        folder.mkdir(exist_ok=True)
        shutil.copytree(self.repo, repo, symlinks=True)
        cache = folder / "cache"
        shutil.copytree(self.cache, cache)
        return Checkout(repo, self.upstream, cache)

    def environment(self) -> dict[str, str]:
        home = self.repo.parent / "home"
        home.mkdir(exist_ok=True)
        # The interpreter of the tests is the python3 of the scripts.
        python = self.repo.parent / "bin"
        python.mkdir(exist_ok=True)
        if not (python / "python3").exists():
            (python / "python3").symlink_to(sys.executable)
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))
        }
        return env | {
            "HOME": str(home),
            "PATH": f"{python}:{os.environ['PATH']}",
            "PATCHSTACK_CACHE": str(self.cache),
            "PIP_INDEX_URL": UNREACHABLE,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "0",
            **self.env,
        }

    def run(self, command: str, *args: str, cwd: Path | None = None):
        """Run `scripts/COMMAND.sh`."""
        script = self.repo / "scripts" / f"{command}.sh"
        return subprocess.run(
            [script, *args],
            env=self.environment(),
            cwd=cwd or self.repo,
            capture_output=True,
            text=True,
        )

    def ok(self, command: str, *args: str, cwd: Path | None = None) -> str:
        done = self.run(command, *args, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fails(self, command: str, *args: str, code: int = 1) -> str:
        """The error line of a run that must fail."""
        done = self.run(command, *args)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        errors = [line for line in done.stderr.splitlines() if line[:2] != "  "]
        assert len(errors) == 1, done.stderr
        return errors[0].removeprefix("error: ")

    def offer(self, upstream: Upstream) -> None:
        """Put a release's archives into the cache."""
        for archive in (upstream.sdist, upstream.wheel):
            place = self.cache / "archives" / sha256(archive.read_bytes())
            place.mkdir(parents=True)
            shutil.copy2(archive, place)

    def surround_with_hostile_git(self) -> None:
        """Give the user and the system git settings that change what patches mean."""
        home = self.repo.parent / "home"
        hooks = home / "hooks"
        hooks.mkdir(parents=True)
        for name in ("pre-commit", "post-checkout", "reference-transaction"):
            (hooks / name).write_text("#!/bin/sh\nexit 1\n")
            (hooks / name).chmod(0o755)
        attributes = home / "attributes"
        attributes.write_text("* text eol=crlf ident\n*.py diff=python filter=x\n")
        config = _HOSTILE.format(hooks=hooks, attributes=attributes)
        (home / ".gitconfig").write_text(config)
        (home / "system").write_text(config)
        self.env.update(_HOSTILE_VARIABLES, GIT_CONFIG_SYSTEM=str(home / "system"))

    def inject(self, point: str, *command: str) -> list[str]:
        """Command line of the tool with an event at a point in it."""
        driver = Path(__file__).with_name("inject.py")
        return [sys.executable, "-P", str(driver), str(self.repo), point, *command]

    def edit(self, path: str, old: str, new: str) -> None:
        place = self.tree / path
        text = place.read_bytes().decode()
        assert old in text
        place.write_bytes(text.replace(old, new, 1).encode())

    def text(self, path: str) -> str:
        return (self.tree / path).read_bytes().decode()

    def patch(self, name: str) -> Path:
        return self.repo / "patches" / name

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "state")

    def git(self, *args: str) -> str:
        identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
        done = subprocess.run(
            ["git", *identity, *args], cwd=self.repo, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def snapshot(self) -> dict[str, bytes]:
        """All that a failed run must leave as it was: tree, history, stack."""
        found = {}
        for top in ("vllm", ".tree.git", "patches", "upstream.toml"):
            start = self.repo / top
            for path in [start, *start.rglob("*")]:
                name = str(path.relative_to(self.repo))
                if path.is_symlink():
                    found[name] = b"-> " + os.fsencode(path.readlink())
                elif path.is_file():
                    mode = b"x " if path.stat().st_mode & 0o100 else b"- "
                    found[name] = mode + path.read_bytes()
        # Objects no commit reaches, and what the index knows of file times.
        return {
            name: data
            for name, data in found.items()
            if not name.startswith((".tree.git/objects/", ".tree.git/index"))
        }

    def content(self) -> dict[str, bytes]:
        """Files of the tree, markers aside."""
        return {
            name: data
            for name, data in self.snapshot().items()
            if name.startswith("vllm/") and "/.stack." not in name
        }


def copy_stack(repo: Path) -> Path:
    """This repository's own stack, as the new folder `repo`, not applied."""
    repo.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in ("scripts", "patches"):
        shutil.copytree(REPO / name, repo / name, ignore=ignored)
    shutil.copy2(REPO / "upstream.toml", repo)
    for path in stack.load(REPO).own:
        place = repo / "vllm" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / "vllm" / path, place)
    return repo


def make_checkout(folder: Path, upstream: Upstream) -> Checkout:
    """A repository with own files and pins, but no patches, not applied."""
    repo, cache = folder / "repo", folder / "cache"
    repo.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    (repo / "scripts").mkdir()
    shutil.copytree(
        REPO / "scripts" / "patchstack", repo / "scripts" / "patchstack", ignore=ignored
    )
    for name in ("apply", "refresh", "status", "doctor", "rebase", "export"):
        shutil.copy2(REPO / "scripts" / f"{name}.sh", repo / "scripts")
    shutil.copy2(REPO / ".gitignore", repo)
    for path, text in OWN.items():
        place = repo / "vllm" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (repo / "vllm" / ".gitignore").write_text(own.render([".gitignore", *OWN]))
    (repo / "upstream.toml").write_text(pins(upstream))
    (repo / "patches").mkdir()
    (repo / "patches" / "series").write_text("")
    checkout = Checkout(repo, upstream, cache)
    checkout.offer(upstream)
    checkout.git("init", "-q")
    checkout.git("config", "user.name", "Ada")
    checkout.git("config", "user.email", "ada@example.org")
    checkout.commit()
    return checkout


def pins(upstream: Upstream) -> str:
    """`upstream.toml` of a stack on this release."""
    sdist, wheel = (
        base.Archive(it.name, sha256(it.read_bytes()))
        for it in (upstream.sdist, upstream.wheel)
    )
    replaces = [pin(path, sha256(upstream.files[path])) for path in REPLACED]
    removes = [
        pin(
            path,
            _folder_digest(upstream.files, path)
            if path.endswith("/")
            else sha256(upstream.files[path]),
        )
        for path in REMOVED
    ]
    return base.render(
        base.Base(
            upstream.version,
            sdist,
            {MACHINE: wheel},
            tuple(replaces),
            tuple(removes),
        )
    )


def pin(path: str, digest: str) -> base.Pin:
    return base.Pin(path, digest, "ours is better")


def budget(checkout: Checkout, patch: str, lines: int, why: str = "it is long") -> None:
    """State a budget in the checkout's `upstream.toml`."""
    place = checkout.repo / "upstream.toml"
    entry = base.Budget(patch, lines, why)
    old = base.parse(place.read_text())
    new = base.Base(**vars(old) | {"budgets": (*old.budgets, entry)})
    place.write_text(base.render(new))


def _folder_digest(files: dict[str, bytes], folder: str) -> str:
    listing = "".join(
        f"{sha256(data)}  {path.removeprefix(folder)}\n"
        for path, data in sorted(files.items())
        if path.startswith(folder)
    )
    return sha256(listing.encode())


def expected_tree(checkout: Checkout, patched: dict[str, bytes]) -> dict[str, bytes]:
    """What the tree must hold: release, wheel, own files, `patched` texts."""
    files = {
        path: data
        for path, data in checkout.upstream.files.items()
        if not path.startswith(REMOVED)
    }
    files |= WHEEL_ONLY | patched
    files |= {path: text.encode() for path, text in OWN.items()}
    files[".gitignore"] = own.render([".gitignore", *OWN]).encode()
    tree = {
        f"vllm/{path}": (b"x " if path in EXECUTABLE or path.endswith(".so") else b"- ")
        + data
        for path, data in files.items()
    }
    return tree | {f"vllm/{path}": f"-> {to}".encode() for path, to in LINKS.items()}
