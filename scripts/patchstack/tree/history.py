"""The tree's own git history: the release, the base, one commit for each patch.

Everything here works on objects and a private index, never on the files of the
tree.  Commits depend on the stack alone, so their ids are the same everywhere.
Application is strict: git itself accepts a hunk that has moved, so each file
must be, before and after, exactly the text that the patch was made for.
"""

import email.utils
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import StackError, some
from ..git import Git, GitError, listed, names, set_attributes
from ..stack.base import Base
from ..stack.patch import FileDiff, Patch, parse

BRANCH = "refs/heads/stack"
RELEASE = "refs/patchstack/release"

Entry = tuple[str, str]
"""Mode and blob id of a file."""

_BASE_PERSON = "upstream <upstream@localhost>"
_BASE_DATE = "Thu, 01 Jan 2026 00:00:00 +0000"
_ABSENT = ("", "0" * 40)
_REMAKE = "scripts/refresh.sh --reseal, or make the edit again in the tree"
_MAIL = (
    "--stdout", "--zero-commit", "--full-index", "--no-signature", "--no-stat",
    "--no-encode-email-headers", "--no-renames", "--no-ext-diff", "--no-textconv",
    "--no-color", "--unified=3", "--inter-hunk-context=0", "--diff-algorithm=histogram",
    "--indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip


class PatchFailure(StackError):
    """A patch that does not apply exactly."""


@dataclass(frozen=True)
class Built:
    """The commits of a stack: `commits[0]` is the base, then one a patch."""

    commits: list[str]

    @property
    def head(self) -> str:
        """The commit of the last patch."""
        return self.commits[-1]


class History:
    """A git directory of releases and stacks."""

    def __init__(self, git_dir: Path, objects: Path | None = None) -> None:
        """Use a git directory, new objects going to the folder `objects` if given."""
        self.git_dir = git_dir
        self.git = Git(git_dir, objects=objects)

    def exists(self) -> bool:
        """Whether there is a repository."""
        return (self.git_dir / "HEAD").is_file()

    def create(self) -> None:
        """Make an empty one."""
        self.git.run("init", "-q", "--bare", "--template=")
        set_attributes(self.git_dir)
        # With a work tree named on the command line, plain git then works here.
        self.git.run("config", "core.bare", "false")
        self.git.run("config", "core.autocrlf", "false")
        self.git.run("config", "status.showUntrackedFiles", "no")
        self.git.run("symbolic-ref", "HEAD", BRANCH)

    @contextmanager
    def unchanged(self) -> Iterator["History"]:
        """This history, with all that is added to it forgotten at the end."""
        with tempfile.TemporaryDirectory() as temporary:
            yield History(self.git_dir, Path(temporary))

    def record(self, root: Path, paths: Iterable[str], index: Path) -> str:
        """Store the files `paths` of the folder `root`; returns their tree's id."""
        git = Git(self.git_dir, root, index)
        # Every file counts as big: they go into one pack, not into a file each.
        packed = ("-c", "core.bigFileThreshold=1")
        update = ("update-index", "--add", "-z", "--stdin")
        git.run(*packed, *update, stdin=listed(paths))
        return git.line("write-tree")

    def files(self, tree: str) -> dict[str, Entry]:
        """Return path -> (mode, blob id) of a tree or commit."""
        found = {}
        for entry in names(self.git.run("ls-tree", "-r", "-z", tree)):
            meta, path = entry.split("\t", 1)
            mode, _, blob = meta.split()
            found[path] = (mode, blob)
        return found

    def blob(self, blob: str) -> bytes:
        """Return a blob's content."""
        return self.git.run("cat-file", "blob", blob)

    def known(self, blob: str) -> str | None:
        """Return the full id of a blob, which may be given short; None without it."""
        try:
            return self.git.line("rev-parse", "--verify", "-q", f"{blob}^{{blob}}")
        except GitError:
            return None

    def store(self, data: bytes) -> str:
        """Store a text; returns its blob id."""
        return self.git.line("hash-object", "-w", "--stdin", stdin=data)

    def tree_of(self, commit: str) -> str:
        """Return the tree id of a commit."""
        return self.git.line("rev-parse", f"{commit}^{{tree}}")

    def with_blobs(self, tree: str, blobs: Mapping[str, Entry]) -> str:
        """Return the tree with some files set."""
        if not blobs:
            return tree
        with self._index() as git:
            git.run("read-tree", tree)
            lines = (f"{mode} {blob}\t{path}" for path, (mode, blob) in blobs.items())
            git.run("update-index", "-z", "--index-info", stdin=listed(lines))
            return git.line("write-tree")

    def without(self, tree: str, paths: Iterable[str]) -> str:
        """Return the tree without some of its files."""
        with self._index() as git:
            git.run("read-tree", tree)
            remove = ("update-index", "--force-remove", "-z", "--stdin")
            git.run(*remove, stdin=listed(paths))
            return git.line("write-tree")

    def trim(self, tree: str, base: Base) -> str:
        """Return the tree without what gives way to the stack."""
        return self.without(tree, filter(base.gives_way, self.files(tree)))

    def mail(self, commit: str, *options: str) -> bytes:
        """Return the commit, or a range, as mails: the form of our patch files."""
        what = commit if ".." in commit else f"{commit}^..{commit}"
        mails = self.git.run("format-patch", *_MAIL, *options, what)
        # What git puts behind a hunk's place quotes upstream.
        return re.sub(rb"^(@@ -[\d,]+ \+[\d,]+ @@).*$", rb"\1", mails, flags=re.M)

    def renames(self, before: str, after: str) -> dict[str, str]:
        """Return files that only `before` has -> those of `after` most like them."""
        out = self.git.run(
            *("diff-tree", "-r", "-z", "--name-status", "--find-renames=50%"),
            *("--diff-filter=R", "-l", "0", before, after),
        )
        # Three fields each: how alike, the old name, the new one.
        fields = names(out)
        return dict(zip(fields[1::3], fields[2::3], strict=True))

    def count_lines(self, before: str, after: str) -> tuple[int, int]:
        """Return how many lines the second of two blobs gains and loses."""
        out = self.git.line("diff", "--numstat", before, after)
        added, removed = out.split("\t")[:2]
        # git counts no lines of what it takes for binary.
        return (0, 0) if added == "-" else (int(added), int(removed))

    def range_diff(self, old: str, new: str) -> str:
        """Return how a patch's commit differs from what became of it; no colours."""
        pair = (f"{old}^..{old}", f"{new}^..{new}")
        options = ("--no-color", "--creation-factor=999", "--no-notes")
        return self.git.run("range-diff", *options, *pair).decode(errors="replace")

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
                commits.append(self.commit(tree, commits[-1], patch))
        return Built(commits)

    def _apply(self, git: Git, patch: Patch, files: dict[str, Entry]) -> None:
        where = f"patches/{patch.name}"
        for file in patch.files:
            blob = files.get(file.path, _ABSENT)[1]
            if blob == file.after:
                raise PatchFailure(
                    f"{where}: {file.path} already has this edit: upstream took it, "
                    f"so take it out: scripts/refresh.sh --drop {patch.topic}"
                )
            if blob == _ABSENT[1]:
                raise PatchFailure(
                    f"{where}: {file.path} is not in the base: {_REMAKE}"
                )
            if blob != file.before:
                raise PatchFailure(
                    f"{where} was made for another text of {file.path} "
                    f"({file.before[:12]}, found {blob[:12]}): {_REMAKE}"
                )
        diff = b"".join(file.diff for file in patch.files)
        try:
            git.run("apply", "--cached", "-", stdin=diff)
        except GitError as fault:
            raise PatchFailure(f"{where} does not fit ({fault}): {_REMAKE}") from None
        files |= _staged(git, patch.touches)
        moved = [it.path for it in patch.files if files[it.path][1] != it.after]
        if moved:
            raise PatchFailure(
                f"{where} would change {some(moved)} in another way than it was made "
                f"to (it was edited by hand): {_REMAKE}"
            )

    def edited(self, blob: str, file: FileDiff) -> str | None:
        """Return the blob with a patch's edit of a file; None if it does not fit.

        git looks for the place of the hunks, with all their context.
        """
        with self._index() as git:
            entry = f"{file.mode},{blob},{file.path}"
            git.run("update-index", "--add", "--cacheinfo", entry)
            try:
                git.run("apply", "--cached", "-", stdin=file.diff)
            except GitError:
                return None
            return _staged(git, [file.path])[file.path][1]

    def applies_alone(self, base: Mapping[str, Entry], patch: Patch) -> bool:
        """Whether the patch fits files of the base, without the patches before it."""
        return all(
            file.path in base and self.edited(base[file.path][1], file)
            for file in patch.files
        )

    def merge(
        self, blobs: tuple[str, str, str], labels: Iterable[str]
    ) -> tuple[bytes, bool]:
        """Merge ours, old and theirs: the text, and whether it holds conflicts.

        `labels` stand at the conflict markers, in that order.
        """
        with tempfile.TemporaryDirectory() as temporary:
            files = []
            for name, blob in zip("abc", blobs, strict=True):
                files.append(Path(temporary) / name)
                files[-1].write_bytes(self.blob(blob))
            options = [part for label in labels for part in ("-L", label)]
            command = ["merge-file", "-p", "-q", "--diff3", *options]
            try:
                return self.git.run(*command, *map(str, files)), False
            except GitError as fault:
                # The code is the number of conflicts, or for a failure 128 and up.
                if fault.code >= 128:
                    raise
                return fault.output, True

    def ignored(self, tree: str, paths: Iterable[str]) -> set[str]:
        """Return those of the paths that the tree's own ignore files hide from git."""
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
        """Commit a base; returns the commit's id."""
        base = Patch("", _BASE_PERSON, _BASE_DATE, f"vLLM {version}\n", ())
        return self.commit(tree, None, base)

    def commit(self, tree: str, parent: str | None, patch: Patch) -> str:
        """Commit a tree in a patch's words; returns the commit's id."""
        name, address = email.utils.parseaddr(patch.author)
        who = {}
        for role in ("AUTHOR", "COMMITTER"):
            who[f"GIT_{role}_NAME"] = name or address
            who[f"GIT_{role}_EMAIL"] = address
            who[f"GIT_{role}_DATE"] = patch.date
        parents = ("-p", parent) if parent else ()
        command = ("commit-tree", tree, *parents, "-F", "-")
        text = patch.message.encode()
        return self.git.run(*command, stdin=text, extra=who).decode().strip()

    def seal(self, patch: Patch, tree: str, parent: str) -> tuple[str, Patch]:
        """Commit a tree in a patch's words: the commit, and the patch that makes it."""
        commit = self.commit(tree, parent, patch)
        return commit, parse(patch.name, self.mail(commit))

    def commits(self, head: str) -> set[str]:
        """Return a commit and those before it."""
        return set(self.git.line("rev-list", head).split())

    def head(self) -> str | None:
        """Return the commit that the tree was made from, as far as git was told."""
        try:
            return self.git.line("rev-parse", "--verify", "-q", BRANCH)
        except GitError:
            return None

    def settle(self, tree: Path, commit: str, release: str, version: str) -> None:
        """Bring branch and index to the commit that the folder `tree` is made from."""
        # --reset keeps what the index knows of files that stay the same.
        Git(self.git_dir, tree).run("read-tree", "--reset", "-i", commit)
        whole = Patch("", _BASE_PERSON, _BASE_DATE, f"vLLM {version}, whole\n", ())
        self.git.run("update-ref", RELEASE, self.commit(release, None, whole))
        self.git.run("update-ref", BRANCH, commit)

    @contextmanager
    def _index(self) -> Iterator[Git]:
        with tempfile.TemporaryDirectory() as temporary:
            index = Path(temporary) / "index"
            yield Git(self.git_dir, index=index, objects=self.git.objects)


def _staged(git: Git, paths: list[str]) -> dict[str, Entry]:
    found = {}
    for entry in names(git.run("ls-files", "-s", "-z", "--", *paths)):
        meta, path = entry.split("\t", 1)
        mode, blob, _ = meta.split()
        found[path] = (mode, blob)
    return found
