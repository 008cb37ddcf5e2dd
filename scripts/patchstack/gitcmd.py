"""git, deaf to the user's configuration.

Line ends, whitespace rules, hooks, signing, diff drivers and aliases of the
machine would change what a patch means, so none of them reaches these calls.
"""

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import StackError

_CONFIG = {
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.excludesFile": os.devnull,
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.logAllRefUpdates": "false",
    "core.looseCompression": "1",
    "core.quotePath": "false",
    "core.safecrlf": "false",
    "core.symlinks": "true",
    "core.untrackedCache": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "utf-8",
    "safe.directory": "*",
    "status.renames": "false",
    # Upstream's nested ignore files must not decide what counts as an edit.
    "status.showUntrackedFiles": "no",
}


def clean_environment() -> dict[str, str]:
    """The environment without git's variables and without a configuration."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    # git before 2.32 knows no GIT_CONFIG_GLOBAL: take its home away as well.
    env |= {
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "HOME": os.devnull,
        "LC_ALL": "C",
        "XDG_CONFIG_HOME": os.devnull,
    }
    return env


class GitError(StackError):
    """A git command failed; the text is git's own."""

    def __init__(self, said: str, code: int = 0, output: bytes = b"") -> None:
        super().__init__(said)
        self.code = code
        self.output = output
        """What it had written to stdout."""


def call(
    command: list[str],
    env: Mapping[str, str],
    stdin: bytes = b"",
    cwd: Path | None = None,
) -> bytes:
    """Output of a git command; raises `GitError` with what git said."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, env=env, cwd=cwd, check=False
        )
    except FileNotFoundError:
        raise StackError("git is not installed: install git") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or "no message"
        raise GitError(said.replace("\n", "; "), done.returncode, done.stdout)
    return done.stdout


@dataclass(frozen=True)
class Git:
    """git on one repository, with a work tree and an index of our choice."""

    git_dir: Path
    work_tree: Path | None = None
    index: Path | None = None

    def run(
        self,
        *args: str,
        stdin: bytes = b"",
        extra: Mapping[str, str] | None = None,
    ) -> bytes:
        env = clean_environment() | {"GIT_DIR": str(self.git_dir)} | dict(extra or {})
        if self.index is not None:
            env["GIT_INDEX_FILE"] = str(self.index)
        if self.work_tree is not None:
            env["GIT_WORK_TREE"] = str(self.work_tree)
        options = [part for k, v in _CONFIG.items() for part in ("-c", f"{k}={v}")]
        where = self.work_tree or self.git_dir.parent
        return call(["git", *options, *args], env, stdin, where)

    def line(self, *args: str, stdin: bytes = b"") -> str:
        return self.run(*args, stdin=stdin).decode().strip()


def names(output: bytes) -> list[str]:
    """Fields of a `-z` output; file names may be any bytes."""
    return os.fsdecode(output).split("\0")[:-1]


def listed(paths: Iterable[str]) -> bytes:
    """File names as `-z --stdin` takes them."""
    return b"".join(os.fsencode(path) + b"\0" for path in paths)


def ignore_attributes(git_dir: Path) -> None:
    """Make a git directory deaf to attributes that files of the tree set."""
    place = git_dir / "info" / "attributes"
    place.parent.mkdir(exist_ok=True)
    place.write_text("* -text !eol !ident !filter !working-tree-encoding !diff\n")


def tracked_files(repo: Path) -> dict[str, str] | None:
    """Path -> blob id of what the fork's repository tracks; None without git.

    The repository may be a worktree or a folder of a larger one.
    """
    out = _outer(repo, "ls-files", "-s", "-z")
    if out is None:
        return None
    files = {}
    for entry in names(out):
        meta, path = entry.split("\t", 1)
        files[path] = meta.split()[1]
    return files


def changed_files(repo: Path) -> set[str]:
    """Tracked paths that are not as the fork's repository has them committed."""
    out = _outer(repo, "diff", "--name-only", "--relative", "-z", "HEAD", "--")
    return set(names(out or b""))


def _outer(repo: Path, *args: str) -> bytes | None:
    command = ["git", "-c", "safe.directory=*", "-c", "core.quotePath=false", *args]
    try:
        return call(command, clean_environment(), cwd=repo)
    except GitError:
        return None


def user_identity(repo: Path) -> str:
    """`Name <address>` of the user, as their own git configuration has it."""
    values = []
    for key, otherwise in (("name", "patch stack"), ("email", "patchstack@localhost")):
        try:
            out = call(["git", "config", f"user.{key}"], os.environ, cwd=repo)
            values.append(out.decode().strip() or otherwise)
        except GitError:
            values.append(otherwise)
    return "{} <{}>".format(*values)
