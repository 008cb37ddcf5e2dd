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
    "core.compression": "1",
    "core.eol": "lf",
    "core.excludesFile": os.devnull,
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.logAllRefUpdates": "false",
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
    """Return the environment without git's variables and without a configuration."""
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
        """Keep what git said, its exit code and what it had written to stdout."""
        super().__init__(said)
        self.code = code
        self.output = output


def call(
    command: list[str],
    env: Mapping[str, str],
    stdin: bytes = b"",
    cwd: Path | None = None,
) -> bytes:
    """Return the output of a git command; raises `GitError` with what git said."""
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
    objects: Path | None = None
    """Where new objects go, if not into the repository."""

    def run(
        self,
        *args: str,
        stdin: bytes = b"",
        extra: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the output of `git ARGS`; `extra` are variables of its environment."""
        env = clean_environment() | {"GIT_DIR": str(self.git_dir)} | dict(extra or {})
        if self.objects is not None:
            env["GIT_OBJECT_DIRECTORY"] = str(self.objects)
            # Quoted: the list is split at colons.
            quoted = str(self.git_dir / "objects").replace("\\", "\\\\")
            quoted = quoted.replace('"', '\\"')
            env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = f'"{quoted}"'
        if self.index is not None:
            env["GIT_INDEX_FILE"] = str(self.index)
        if self.work_tree is not None:
            env["GIT_WORK_TREE"] = str(self.work_tree)
        options = [part for k, v in _CONFIG.items() for part in ("-c", f"{k}={v}")]
        where = self.work_tree or self.git_dir.parent
        return call(["git", *options, *args], env, stdin, where)

    def line(self, *args: str, stdin: bytes = b"") -> str:
        """Return the output of `git ARGS` as text, without its last line feed."""
        return self.run(*args, stdin=stdin).decode().strip()


def names(output: bytes) -> list[str]:
    """Return the fields of a `-z` output; file names may be any bytes."""
    return os.fsdecode(output).split("\0")[:-1]


def listed(paths: Iterable[str]) -> bytes:
    """Return file names as `-z --stdin` takes them."""
    return b"".join(os.fsencode(path) + b"\0" for path in paths)


def set_attributes(git_dir: Path, *more: str) -> None:
    """Make a git directory deaf to attributes of the tree, but for lines of ours."""
    place = git_dir / "info" / "attributes"
    place.parent.mkdir(exist_ok=True)
    deaf = "* -text !eol !ident !filter !working-tree-encoding !diff\n"
    place.write_text(deaf + "".join(f"{line}\n" for line in more))


def tracked_files(repo: Path) -> dict[str, str] | None:
    """Return path -> blob id of what the fork's repository tracks; None without git.

    The repository may be a worktree or a folder of a larger one.
    """
    out = _outer(repo, "ls-files", "-s", "-z")
    if out is None:
        return None
    entries = (entry.split("\t", 1) for entry in names(out))
    return {path: meta.split()[1] for meta, path in entries}


def changed_files(repo: Path) -> set[str]:
    """Return tracked paths that are not as the fork's repository has them committed."""
    out = _outer(repo, "diff", "--name-only", "--relative", "-z", "HEAD", "--")
    return set(names(out or b""))


def _outer(repo: Path, *args: str) -> bytes | None:
    command = ["git", "-c", "safe.directory=*", "-c", "core.quotePath=false", *args]
    try:
        return call(command, clean_environment(), cwd=repo)
    except GitError:
        return None


def user_identity(repo: Path) -> str | None:
    """Return `Name <address>` of the user's own git configuration; None without."""
    try:
        name, address = (
            call(["git", "config", f"user.{key}"], os.environ, cwd=repo)
            .decode()
            .strip()
            for key in ("name", "email")
        )
    except GitError:
        return None
    return f"{name} <{address}>" if name and address else None
