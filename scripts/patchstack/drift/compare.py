"""Drift: what our code takes from upstream, compared between two releases.

No hunk need conflict for the fork to break: a method we override may be renamed,
a function we call may want another argument, a class may come to set an attribute
that ours sets too.  Everything here is a comparison of two source trees.
"""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..errors import some
from .symbols import FUNCTIONS, Definition, SourceTree
from .uses import BUILDER, Code, How, OwnClass, Use, collect


class Level(StrEnum):
    """How much a change matters."""

    BREAKING = "breaking"
    """Gone, another signature or base class, or in the way of ours."""
    CHANGED = "changed"
    """It does something else inside; whether that matters is to be judged."""


@dataclass(frozen=True)
class Finding:
    """A change in what our code takes from upstream."""

    level: Level
    symbol: str
    change: str
    used_by: tuple[str, ...]
    """where we use it: `PATH: SCOPE`"""


_Member = tuple[str, str, str | None]
"""Module, name, member of a use."""


@dataclass(frozen=True)
class Change:
    """What changed in a symbol."""

    level: Level
    text: str


def compare(
    codes: Iterable[Code], own: Collection[str], old: SourceTree, new: SourceTree
) -> list[Finding]:
    """Return findings on everything that `codes` take from upstream, breaking first."""
    uses: list[Use] = []
    classes: list[OwnClass] = []
    for code in codes:
        found = collect(code, old, own)
        uses += found[0]
        classes += found[1]
    # A member that we name has a finding of its own.
    told = {(use.module, use.name, use.member) for use in uses}
    changes: dict[tuple[str, Change], set[str]] = {}
    for use in uses:
        for symbol, change in _compare_use(use, told, old, new):
            changes.setdefault((symbol, change), set()).add(use.where)
    for ours in classes:
        for symbol, change in _collisions(ours, old, new):
            changes.setdefault((symbol, change), set()).add(ours.where)
    recorded = {(use.module, use.name): use for use in uses if use.how == How.RECORD}
    places = {use.where for use in recorded.values()}
    for symbol, change in _builders({module for module, _ in recorded}, old, new):
        changes.setdefault((symbol, change), set()).update(places)
    for (module, name), use in sorted(recorded.items()):
        for symbol, change in _metadata(module, name, old, new):
            changes.setdefault((symbol, change), set()).add(use.where)
    findings = [
        Finding(change.level, symbol, change.text, tuple(sorted(where)))
        for (symbol, change), where in changes.items()
    ]
    return sorted(findings, key=lambda it: (it.level, it.symbol, it.change))


def _breaking(text: str) -> Change:
    return Change(Level.BREAKING, text)


def _changed(text: str) -> Change:
    return Change(Level.CHANGED, text)


def _compare_use(
    use: Use, told: Collection[_Member], old: SourceTree, new: SourceTree
) -> Iterator[tuple[str, Change]]:
    before = old.find(use.module, use.name)
    if before is None:
        return
    after = new.find(use.module, use.name)
    symbol = f"{use.module}.{use.name}"
    if after is None:
        if new.module(use.module) is None and old.module(use.module) is not None:
            yield use.module, _breaking("the module is gone")
        else:
            yield symbol, _breaking("gone" + _renamed(before, old, new))
        return
    if use.member is None:
        yield from (
            (symbol, it)
            for it in _compare_symbol(use, told, (before, after), (old, new))
        )
        return
    symbol += f".{use.member}"
    was = old.member(before, use.member)
    now = new.member(after, use.member)
    if was is None:
        return
    if now is None:
        yield symbol, _breaking("gone" + _renamed(was, old, new))
    else:
        yield from ((symbol, it) for it in _compare_member(use.how, was, now))


def _compare_symbol(
    use: Use,
    told: Collection[_Member],
    definitions: tuple[Definition, Definition],
    trees: tuple[SourceTree, SourceTree],
) -> Iterator[Change]:
    (before, after), (old, new) = definitions, trees
    if before.kind != after.kind:
        yield _breaking(f"was a {before.kind}, is a {after.kind}")
        return
    if before.kind != "class":
        yield from _compare_member(use.how, before, after)
        return
    if before.decorators != after.decorators:
        yield _breaking(_from_to("decorators", before.decorators, after.decorators))
    if use.how in (How.EXTEND, How.RECORD) and before.bases != after.bases:
        yield _breaking(_from_to("base classes", before.bases, after.bases))
    if use.how == How.CALL:
        was, now = _constructor(before, old), _constructor(after, new)
        if was != now:
            yield _breaking(f"its constructor was {was}, is {now}")
    if use.how in (How.EXTEND, How.RECORD):
        named = {member for *at, member in told if at == [use.module, use.name]}
        inside = [
            {name: it for name, it in members.items() if name not in named}
            for members in (_all_members(before, old), _all_members(after, new))
        ]
        yield from _compare_whole(*inside)


def _compare_member(how: How, was: Definition, now: Definition) -> Iterator[Change]:
    if was.kind != now.kind:
        yield _breaking(f"was a {was.kind}, is a {now.kind}")
        return
    if was.decorators != now.decorators:
        yield _breaking(_from_to("decorators", was.decorators, now.decorators))
    if was.signature != now.signature:
        yield _breaking(f"was {was.signature or 'bare'}, is {now.signature or 'bare'}")
    if was.digest != now.digest:
        what = "value" if was.kind == "value" else "body"
        around = " around our lines" if how == How.EDIT else ""
        yield _changed(f"its {what}{around} changed")


def _compare_whole(
    was: Mapping[str, Definition], now: Mapping[str, Definition]
) -> Iterator[Change]:
    """What changed in a class and those it inherits from, names in one line."""
    gone = sorted(was.keys() - now.keys())
    added = sorted(now.keys() - was.keys())
    differ = sorted(
        name
        for name in was.keys() & now.keys()
        if (was[name].signature, was[name].digest)
        != (now[name].signature, now[name].digest)
    )
    for names, how in ((gone, "gone"), (added, "new"), (differ, "changed inside")):
        if names:
            yield _changed(f"{how}: {some(names, 8)}")


def _all_members(of: Definition, tree: SourceTree) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for current in tree.lineage(of):
        for name, node in current.members.items():
            qualname = f"{current.qualname}.{name}"
            found.setdefault(name, Definition(current.module, qualname, node, current))
    return found


def _constructor(of: Definition, tree: SourceTree) -> str:
    """Arguments of a class's constructor; of a record those are its fields."""
    init = tree.member(of, "__init__")
    if init is not None:
        return init.signature
    return "(" + ", ".join(_fields(of, tree)) + ")"


def _fields(of: Definition, tree: SourceTree) -> list[str]:
    """Annotated fields of a class, those of its base classes first."""
    found: dict[str, str] = {}
    for current in reversed(list(tree.lineage(of))):
        for name, node in current.members.items():
            if isinstance(node, ast.AnnAssign):
                value = f" = {ast.unparse(node.value)}" if node.value else ""
                found[name] = f"{name}: {ast.unparse(node.annotation)}{value}"
    return list(found.values())


def _collisions(
    ours: OwnClass, old: SourceTree, new: SourceTree
) -> Iterator[tuple[str, Change]]:
    """Names that our class defines and upstream's has come to define as well."""
    before, after = (tree.find(*ours.base) for tree in (old, new))
    if before is None or after is None:
        return
    for name in sorted(ours.sets):
        now = new.member(after, name)
        if now is not None and old.member(before, name) is None:
            text = f"new, and our {ours.where.rpartition(' ')[2]} defines it too"
            yield f"{now.module.name}.{now.qualname}", _breaking(text)


def _builders(
    modules: Iterable[str], old: SourceTree, new: SourceTree
) -> Iterator[tuple[str, Change]]:
    """Builders that backends in the modules of recorded ones have come to have."""
    for module in sorted(modules):
        for name in sorted(_offered(module, new) - _offered(module, old)):
            yield f"{module}.{name}", _breaking("a new builder, with no declaration")


def _offered(module: str, tree: SourceTree) -> set[str]:
    there = tree.module(module)
    if there is None:
        return set()
    found = set()
    for node in ast.walk(there.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(BUILDER):
            found.add(node.name)
        elif isinstance(node, FUNCTIONS) and node.name == "get_builder_cls":
            for part in ast.walk(node):
                if isinstance(part, ast.Return) and isinstance(part.value, ast.Name):
                    found.add(part.value.id)
    return found


def _metadata(
    module: str, name: str, old: SourceTree, new: SourceTree
) -> Iterator[tuple[str, Change]]:
    """Fields of the metadata that a recorded builder makes."""
    before, after = old.find(module, name), new.find(module, name)
    if before is None or after is None:
        return
    was, now = _made_by(before, old), _made_by(after, new)
    if was is None or now is None:
        return
    if was.qualname != now.qualname:
        yield was.name, _breaking(f"{name} makes {now.qualname} instead")
        return
    fields_before = {it.partition(":")[0]: it for it in _fields(was, old)}
    fields_after = {it.partition(":")[0]: it for it in _fields(now, new)}
    for field in fields_before | fields_after:
        symbol = f"{now.name}.{field}"
        if field not in fields_after:
            yield symbol, _breaking("the metadata field is gone")
        elif field not in fields_before:
            yield symbol, _changed(f"a new metadata field, {fields_after[field]}")
        elif fields_before[field] != fields_after[field]:
            text = f"was {fields_before[field]}, is {fields_after[field]}"
            yield symbol, _breaking(text)


def _made_by(builder: Definition, tree: SourceTree) -> Definition | None:
    """The metadata class that a builder's base class is subscripted with."""
    for current in tree.lineage(builder):
        assert isinstance(current.node, ast.ClassDef)
        for base in current.node.bases:
            if isinstance(base, ast.Subscript):
                found = tree.resolve(base.slice, current.module)
                if found is not None:
                    return found
    return None


def _renamed(was: Definition, old: SourceTree, new: SourceTree) -> str:
    """A hint at what has the body that a vanished function had."""
    if was.kind != "function":
        return ""
    there = new.module(was.module.name)
    if there is None:
        return ""
    before = old.module(was.module.name)
    known = (
        {it.name for it in ast.walk(before.tree) if isinstance(it, FUNCTIONS)}
        if (before)
        else set()
    )
    for node in ast.walk(there.tree):
        if (
            isinstance(node, FUNCTIONS)
            and node.name not in known
            and Definition(there, node.name, node).digest == was.digest
        ):
            return f"; {node.name} has its body"
    return ""


def _from_to(what: str, before: list[str], after: list[str]) -> str:
    return (
        f"its {what} were {', '.join(before) or 'none'}, "
        f"are {', '.join(after) or 'none'}"
    )
