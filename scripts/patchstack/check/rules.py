"""What must hold of a stack: the rules that `status --check` and CI enforce."""

from collections.abc import Callable, Iterator

from .. import git
from ..files import file_sha256, read_text
from ..stack import SERIES, Stack, base, own, version
from ..stack import patch as format_
from ..stack.base import DEFAULT_BUDGET
from ..tree import Tree
from ..tree.history import PatchFailure
from ..tree.marker import read_wheel_files

# The text of the licence is its own author's, in every project that takes it.
_COMMON_TEXTS = ("LICENSE",)


def faults(stack: Stack, machine: str) -> list[str]:
    """Return every rule that is broken, a line each, with what to do about it."""
    applied = Tree(stack.places).fault(stack, machine)
    found = [applied] if applied else []
    with Tree(stack.places).history.unchanged() as history:
        tree = Tree(stack.places, history)
        for rule in RULES:
            found += rule(stack, tree)
    return found


def _format(stack: Stack, _tree: Tree) -> Iterator[str]:
    for patch in stack.patches:
        yield from format_.lint(patch, stack.base.budget(patch.topic))


def _form(stack: Stack, tree: Tree) -> Iterator[str]:
    """Patch files as git would write them: context, headings, blob ids."""
    if not tree.applied:
        return
    try:
        built = tree.history.build(tree.applied.release, stack.base, stack.patches)
    except PatchFailure as fault:
        yield str(fault)
        return
    for patch, commit in zip(stack.patches, built.commits[1:], strict=True):
        if tree.history.mail(commit) != patch.data:
            yield (
                f"patches/{patch.name}: not in the form that git format-patch writes: "
                "scripts/refresh.sh --reseal"
            )


def _budgets(stack: Stack, _tree: Tree) -> Iterator[str]:
    topics = {patch.topic for patch in stack.patches}
    for it in stack.base.budgets:
        if it.patch not in topics:
            yield (
                f"upstream.toml: [[budget]] for {it.patch!r}, which is no patch: drop "
                "it"
            )
        elif it.lines <= DEFAULT_BUDGET or not it.why.strip():
            yield (
                f"upstream.toml: the [[budget]] of {it.patch!r} needs more than "
                f"{DEFAULT_BUDGET} lines and a why"
            )


def _series(stack: Stack, _tree: Tree) -> Iterator[str]:
    known = {SERIES, *(patch.name for patch in stack.patches)}
    if stack.places.patches.is_dir():
        for path in sorted(stack.places.patches.iterdir()):
            if path.name not in known:
                yield f"patches/{path.name} is not in patches/series: add or delete it"


def _pins(stack: Stack, _tree: Tree) -> Iterator[str]:
    text = read_text(stack.places.repo / base.FILE)
    if text != base.render(stack.base):
        yield f"{base.FILE} is not in the form that the tool writes: git diff shows how"
    contradiction = stack.contradiction()
    if contradiction:
        yield contradiction
    for pin in (*stack.base.replaces, *stack.base.removes):
        if not pin.why.strip():
            yield f"upstream.toml: {pin.path} gives way without a why: state it"


def _nothing_of_upstreams(stack: Stack, tree: Tree) -> Iterator[str]:
    """No file in git has the content of one of the release or the wheel."""
    if not tree.applied:
        return
    released = tree.history.files(tree.applied.release)
    blobs = {blob: path for path, (_, blob) in released.items()}
    wheel = read_wheel_files(tree.folder).items()
    binaries = {it.sha256: path for path, it in wheel if it.size}
    for path, blob in (git.tracked_files(stack.places.repo) or {}).items():
        place = stack.places.repo / path
        size = place.stat().st_size if place.is_file() else 0
        if place.name in _COMMON_TEXTS or not size:
            continue
        twin = blobs.get(blob) or binaries.get(file_sha256(place))
        if twin:
            yield f"{path} is upstream's {twin}: take it out of git"


def _alone(stack: Stack, tree: Tree) -> Iterator[str]:
    if tree.applied:
        files = tree.history.files(tree.applied.release)
        for patch in stack.patches:
            if not tree.history.applies_alone(files, patch):
                yield (
                    f"patches/{patch.name} does not apply to the base alone: fold it "
                    "into the patch it builds on"
                )


def _own_files(stack: Stack, tree: Tree) -> Iterator[str]:
    if read_text(tree.folder / own.MANIFEST) != own.render(stack.own):
        yield "vllm/.gitignore is not as scripts/refresh.sh --own writes it: use that"
    tracked = git.tracked_files(stack.places.repo)
    if tracked is None:
        return
    inside = {
        path.removeprefix("vllm/") for path in tracked if path.startswith("vllm/")
    }
    for path in sorted(inside.difference(stack.own)):
        yield (
            f"vllm/{path} is in git but no own file: scripts/refresh.sh --own "
            f"vllm/{path}, or git rm it"
        )
    for path in sorted(set(stack.own) - inside):
        yield f"own file vllm/{path} is not in git: git add vllm/{path}"


def _version(stack: Stack, tree: Tree) -> Iterator[str]:
    stated = version.read(tree.folder)
    release, _, local = (stated or "").partition("+")
    if stated is None or release != stack.base.version or not local:
        wanted = f"{stack.base.version}+LOCAL"
        yield f"vllm/{version.FILE} says {stated}: make it {wanted}"
    elif "cpu" in stated:
        yield f"vllm/{version.FILE} says {stated}: vLLM takes 'cpu' for a CPU build"


RULES: tuple[Callable[[Stack, Tree], Iterator[str]], ...] = (
    _format,
    _form,
    _budgets,
    _series,
    _pins,
    _nothing_of_upstreams,
    _alone,
    _own_files,
    _version,
)
