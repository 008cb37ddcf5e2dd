"""The tree's own git history: the release, the base, one commit for each patch.

Everything here works on objects and a private index, never on the files of the
tree.  Commits depend on the stack alone, so their ids are the same everywhere.
Application is strict: git itself accepts a hunk that has moved, so each file
must be, before and after, exactly the text that the patch was made for.
"""

import email.utils
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .base import Base
from .errors import StackError, some
from .gitcmd import Git, GitError, ignore_attributes, listed, names
from .patches import FileDiff, Patch, parse_diff

BRANCH = "refs/heads/stack"
RELEASE = "refs/patchstack/release"

_BASE_PERSON = "upstream <upstream@localhost>"
_BASE_DATE = "Thu, 01 Jan 2026 00:00:00 +0000"
_ABSENT = "0" * 40
_REMAKE = "make the edit again in the tree and run scripts/refresh.sh"


class PatchFailure(StackError):
    """A patch that does not apply exactly."""


@dataclass(frozen=True)
class Built:
    """The commits of a stack: `commits[0]` is the base, then one a patch."""

    commits: list[str]

    @property
    def head(self) -> str:
        return self.commits[-1]


class History:
    def __init__(self, git_dir: Path) -> None:
        self.git_dir = git_dir
        self.git = Git(git_dir)

    def exists(self) -> bool:
        return (self.git_dir / "HEAD").is_file()

    def create(self) -> None:
        Git(self.git_dir).run("init", "-q", "--bare", "--template=")
        ignore_attributes(self.git_dir)
        # With a work tree named on the command line, plain git then works here.
        self.git.run("config", "core.bare", "false")
        self.git.run("config", "core.autocrlf", "false")
        self.git.run("config", "status.showUntrackedFiles", "no")
        self.git.run("symbolic-ref", "HEAD", BRANCH)

    def record_release(self, root: Path, paths: Iterable[str], index: Path) -> str:
        """Store the files `paths` of the folder `root`; returns their tree's id."""
        git = Git(self.git_dir, root, index)
        git.run("update-index", "--add", "-z", "--stdin", stdin=listed(paths))
        return git.line("write-tree")

    def files(self, tree: str) -> dict[str, tuple[str, str]]:
        """Path -> (mode, blob id) of a tree or commit."""
        found = {}
        for entry in names(self.git.run("ls-tree", "-r", "-z", tree)):
            meta, path = entry.split("\t", 1)
            mode, _, blob = meta.split()
            found[path] = (mode, blob)
        return found

    def blob(self, blob: str) -> bytes:
        return self.git.run("cat-file", "blob", blob)

    def store(self, data: bytes) -> str:
        return self.git.line("hash-object", "-w", "--stdin", stdin=data)

    def tree_of(self, commit: str) -> str:
        return self.git.line("rev-parse", f"{commit}^{{tree}}")

    def with_blobs(self, tree: str, blobs: Mapping[str, tuple[str, str]]) -> str:
        """The tree with some files set to (mode, blob id)."""
        with self._index() as git:
            git.run("read-tree", tree)
            lines = (f"{mode} {blob}\t{path}" for path, (mode, blob) in blobs.items())
            git.run("update-index", "-z", "--index-info", stdin=listed(lines))
            return git.line("write-tree")

    def diff(self, where: str, before: str, after: str) -> list[FileDiff]:
        """Files that differ between two trees, as edits."""
        return parse_diff(where, self.raw_diff(before, after))

    def raw_diff(self, before: str, after: str, *options: str) -> bytes:
        """The difference of two trees as git prints it."""
        return self.git.run(
            "diff-tree", "-r", "-p", "--full-index", "--no-renames", "--no-ext-diff",
            "--no-textconv", "--no-color", "--unified=3", "--inter-hunk-context=0",
            "--diff-algorithm=histogram", "--indent-heuristic", "--src-prefix=a/",
            "--dst-prefix=b/", *options, before, after,
        )  # fmt: skip

    def renames(self, before: str, after: str) -> dict[str, str]:
        """Files that only `before` has -> the files of `after` most like them."""
        out = self.git.run(
            *("diff-tree", "-r", "-z", "--name-status", "--find-renames=50%"),
            *("--diff-filter=R", "-l", "0", before, after),
        )
        # Three fields each: how alike, the old name, the new one.
        fields = names(out)
        return dict(zip(fields[1::3], fields[2::3], strict=True))

    def count_lines(self, before: str, after: str) -> tuple[int, int]:
        """Lines that the second of two blobs gains and loses."""
        out = self.git.line("diff", "--numstat", before, after)
        added, removed = out.split("\t")[:2]
        # git counts no lines of what it takes for binary.
        return (0, 0) if added == "-" else (int(added), int(removed))

    def adopt(self, other: "History") -> None:
        """Take the objects of another history, as the same files where possible."""
        for place in (other.git_dir / "objects").rglob("*"):
            target = self.git_dir / place.relative_to(other.git_dir)
            if place.is_dir():
                target.mkdir(exist_ok=True)
            elif not target.exists():
                try:
                    os.link(place, target)
                except OSError:
                    shutil.copy2(place, target)

    def range_diff(self, old: str, new: str) -> str:
        """How a patch's commit differs from what became of it; no colours."""
        pair = (f"{old}^..{old}", f"{new}^..{new}")
        options = ("--no-color", "--creation-factor=999", "--no-notes")
        return self.git.run("range-diff", *options, *pair).decode(errors="replace")

    def build(self, release: str, base: Base, patches: Iterable[Patch]) -> Built:
        """Commit base and patches; raises `PatchFailure` at the first that fails."""
        tree = self.trim(release, base)
        commits = [self.commit_base(tree, base.version)]
        files = self.files(tree)
        with self._index() as git:
            git.run("read-tree", tree)
            for patch in patches:
                self._apply(git, patch, files)
                tree = git.line("write-tree")
                commits.append(self.commit_patch(tree, commits[-1], patch))
        return Built(commits)

    def applies_alone(self, base_commit: str, patch: Patch) -> bool:
        """Whether git can apply the patch to the base without those before it."""
        with self._index() as git:
            git.run("read-tree", base_commit)
            try:
                git.run("apply", "--cached", "--check", "-", stdin=patch.diff())
            except GitError:
                return False
        return True

    def merge(
        self, ours: str, old: str, theirs: str, names: tuple[str, str, str]
    ) -> tuple[bytes, bool]:
        """Three-way merge of blobs: the text, and whether it holds conflicts.

        `names` stand at the conflict markers, in the order of the blobs.
        """
        with tempfile.TemporaryDirectory() as temporary:
            files = []
            for name, blob in zip("abc", (ours, old, theirs), strict=True):
                files.append(Path(temporary) / name)
                files[-1].write_bytes(self.blob(blob))
            labels = [part for name in names for part in ("-L", name)]
            command = ["merge-file", "-p", "-q", "--diff3", *labels]
            try:
                return self.git.run(*command, *map(str, files)), False
            except GitError as fault:
                # The code is the number of conflicts, or for a failure 128 and up.
                if fault.code >= 128:
                    raise
                return fault.output, True

    def trim(self, tree: str, base: Base) -> str:
        """The tree without what gives way to the stack."""
        gone = [path for path in self.files(tree) if base.gives_way(path)]
        return self.without(tree, gone)

    def without(self, tree: str, paths: Iterable[str]) -> str:
        """The tree without some of its files."""
        with self._index() as git:
            git.run("read-tree", tree)
            remove = ("update-index", "--force-remove", "-z", "--stdin")
            git.run(*remove, stdin=listed(paths))
            return git.line("write-tree")

    def ignored(self, tree: str, paths: Iterable[str]) -> set[str]:
        """Those of the paths that the tree's own ignore files hide from git."""
        with tempfile.TemporaryDirectory() as temporary:
            for path, (_, blob) in self.files(tree).items():
                if PurePosixPath(path).name == ".gitignore":
                    place = Path(temporary) / path
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(self.blob(blob))
            command = ("check-ignore", "--no-index", "-z", "--stdin")
            try:
                git = Git(self.git_dir, Path(temporary))
                # This command knows no literal paths.
                extra = {"GIT_LITERAL_PATHSPECS": "0"}
                out = git.run(*command, stdin=listed(paths), extra=extra)
            except GitError as fault:
                # 1 says that none is hidden.
                if fault.code != 1:
                    raise
                return set()
        return set(names(out))

    def commit_base(self, tree: str, version: str) -> str:
        return self.commit(tree, None, _BASE_PERSON, _BASE_DATE, f"vLLM {version}\n")

    def commit_patch(self, tree: str, parent: str, patch: Patch) -> str:
        return self.commit(tree, parent, patch.author, patch.date, patch.message)

    def commit(
        self, tree: str, parent: str | None, author: str, date: str, message: str
    ) -> str:
        name, address = email.utils.parseaddr(author)
        who = {}
        for role in ("AUTHOR", "COMMITTER"):
            who[f"GIT_{role}_NAME"] = name or address
            who[f"GIT_{role}_EMAIL"] = address
            who[f"GIT_{role}_DATE"] = date
        parents = ("-p", parent) if parent else ()
        out = self.git.run(
            "commit-tree", tree, *parents, "-F", "-", stdin=message.encode(), extra=who
        )
        return out.decode().strip()

    def set_release(self, tree: str, version: str) -> None:
        message = f"vLLM {version}, whole\n"
        commit = self.commit(tree, None, _BASE_PERSON, _BASE_DATE, message)
        self.git.run("update-ref", RELEASE, commit)

    def commits(self, head: str) -> set[str]:
        """A commit and those before it."""
        return set(self.git.line("rev-list", head).split())

    def set_head(self, commit: str) -> None:
        self.git.run("update-ref", BRANCH, commit)

    def head(self) -> str | None:
        try:
            return self.git.line("rev-parse", "--verify", "-q", BRANCH)
        except GitError:
            return None

    def _apply(self, git: Git, patch: Patch, files: dict[str, tuple[str, str]]) -> None:
        where = f"patches/{patch.name}"
        for file in patch.files:
            _, blob = files.get(file.path, ("", _ABSENT))
            if blob == file.before:
                line = file.misfit(self.blob(blob))
                if line is None:
                    continue
                raise PatchFailure(
                    f"{where} does not fit {file.path} at line {line}: {_REMAKE}"
                )
            if blob == file.after:
                raise PatchFailure(
                    f"{where}: {file.path} already has this edit: upstream took it, "
                    "so take the patch off patches/series"
                )
            if blob == _ABSENT:
                raise PatchFailure(
                    f"{where}: {file.path} is not in the base: {_REMAKE}"
                )
            raise PatchFailure(
                f"{where} was made for another text of {file.path} "
                f"({file.before[:12]}, found {blob[:12]}): {_REMAKE}"
            )
        git.run("apply", "--cached", "-", stdin=patch.diff())
        out = git.run("ls-files", "-s", "-z", "--", *patch.touches)
        for entry in names(out):
            meta, path = entry.split("\t", 1)
            mode, blob, _ = meta.split()
            files[path] = (mode, blob)
        moved = [file.path for file in patch.files if files[file.path][1] != file.after]
        if moved:
            raise PatchFailure(
                f"{where} would change {some(moved)} in another way than it was made "
                f"to (it was edited by hand): {_REMAKE}"
            )

    @contextmanager
    def _index(self) -> Iterator[Git]:
        with tempfile.TemporaryDirectory() as temporary:
            yield Git(self.git_dir, index=Path(temporary) / "index")
