"""What our code takes from upstream: found in the code itself, by reading it.

A name counts when it is imported; a member when the type of what it is taken
from can be told, by an annotation, a constructor call or the class we extend.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..errors import StackError
from .symbols import (
    FUNCTIONS,
    PACKAGE,
    Definition,
    Function,
    Link,
    Module,
    SourceTree,
    attributes,
    links,
)

BUILDER = "MetadataBuilder"


class How(StrEnum):
    """What we do with a symbol: what of it must stay as it was."""

    IMPORT = "import"
    READ = "read"
    CALL = "call"
    EXTEND = "extend"
    """We subclass it."""
    OVERRIDE = "override"
    RECORD = "record"
    """We vouch for what it does: a metadata builder that we record."""
    EDIT = "edit"
    """A patch puts lines into it."""


@dataclass(frozen=True)
class Use:
    module: str
    name: str
    """A name of the module, or with `member` a class of it."""
    member: str | None
    how: How
    where: str
    """`PATH: SCOPE` of ours."""


@dataclass(frozen=True)
class OwnClass:
    """A class of ours on one of upstream's."""

    where: str
    base: tuple[str, str]
    """Module and name."""
    sets: frozenset[str]
    """Attributes and methods that it defines itself."""


@dataclass(frozen=True)
class Code:
    """Python of ours: a whole file, or the lines that patches add to one."""

    path: str
    text: str
    lines: Collection[int] | None = None
    patch: str | None = None
    """Name of the patch that the lines are from."""

    def place(self, scope: list[str]) -> str:
        start = f"patches/{self.patch}" if self.patch else self.path
        return f"{start}: {'.'.join(scope) or 'top level'}"


def collect(
    code: Code, tree: SourceTree, own: Collection[str]
) -> tuple[list[Use], list[OwnClass]]:
    """Uses and derived classes of a file; `own` are the paths of own files.

    Raises `StackError` if the file is not valid Python.
    """
    name = code.path.removesuffix(".py").replace("/", ".")
    is_package = name.endswith(".__init__")
    try:
        module = Module(name.removesuffix(".__init__"), code.text, is_package)
    except SyntaxError as fault:
        raise StackError(
            f"vllm/{code.path} is not valid Python at line {fault.lineno}: mend it"
        ) from None
    reader = _Reader(code, module, tree, {_module_name(path) for path in own})
    reader.read()
    return reader.uses, reader.classes


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


_CONTAINERS = ("list", "tuple", "set", "frozenset", "Iterable", "Iterator", "Sequence")


@dataclass(frozen=True)
class _Typed:
    """What a name stands for in a scope: an object of a class, or the class."""

    definition: Definition
    is_object: bool
    depth: int = 0
    """How many containers of such objects it is in."""

    def element(self) -> "_Typed | None":
        """What it holds, if it is a container."""
        if not self.depth:
            return None
        return _Typed(self.definition, self.is_object, self.depth - 1)


class _Reader:
    def __init__(
        self, code: Code, module: Module, tree: SourceTree, own: Collection[str]
    ) -> None:
        self.code = code
        self.module = module
        self.tree = tree
        self.own = own
        self.uses: list[Use] = []
        self.classes: list[OwnClass] = []
        self._local_classes: dict[str, ast.ClassDef] = {}
        self._module_names: dict[str, str] = {}
        """Upstream's modules, by the name they have here."""

    def read(self) -> None:
        body = self.module.tree.body
        self._local_classes = {
            node.name: node for node in body if isinstance(node, ast.ClassDef)
        }
        self._block(body, [], {}, None)

    def _block(
        self,
        body: list[ast.stmt],
        scope: list[str],
        known: dict[str, _Typed],
        inside: ast.ClassDef | None,
    ) -> None:
        for statement in body:
            self._statement(statement, scope, known, inside)

    def _statement(
        self,
        statement: ast.stmt,
        scope: list[str],
        known: dict[str, _Typed],
        inside: ast.ClassDef | None,
    ) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._imports(statement, scope, known)
        elif isinstance(statement, ast.ClassDef):
            self._class(statement, scope, known)
        elif isinstance(statement, FUNCTIONS):
            self._function(statement, scope, known, inside)
        else:
            self._expressions(statement, scope, known)
            self._learn(statement, known)
            for field in ("body", "orelse", "finalbody"):
                self._block(getattr(statement, field, []), scope, known, inside)
            for handler in getattr(statement, "handlers", []):
                self._block(handler.body, scope, known, inside)

    def _imports(
        self,
        statement: ast.Import | ast.ImportFrom,
        scope: list[str],
        known: dict[str, _Typed],
    ) -> None:
        for name, link in links(statement, self.module.package):
            known.pop(name, None)
            if not self._upstream(link):
                continue
            found = link.name and self.tree.find(link.module, link.name)
            if not found:
                whole = f"{link.module}.{link.name}" if link.name else link.module
                if whole not in self.own and self.tree.module(whole) is not None:
                    self._module_names[name] = whole
            elif link.name:
                known[name] = _Typed(found, found.kind == "value")
                self._note(link.module, link.name, None, How.IMPORT, statement, scope)

    def _upstream(self, link: Link) -> bool:
        return link.module.partition(".")[0] == PACKAGE and link.module not in self.own

    def _class(
        self, node: ast.ClassDef, scope: list[str], known: dict[str, _Typed]
    ) -> None:
        here = [*scope, node.name]
        base = self._base(node, known)
        if base is not None and self._ours(node):
            sets = {*attributes(node), *Definition(self.module, "", node).members}
            place = self.code.place(here)
            key = (base.module.name, base.qualname)
            self.classes.append(OwnClass(place, key, frozenset(sets)))
            self._note(*key, None, How.EXTEND, node, here)
            for name, member in Definition(self.module, "", node).members.items():
                if self.tree.member(base, name) is not None:
                    self._note(*key, name, How.OVERRIDE, member, [*here, name])
        for expression in (*node.bases, *node.decorator_list):
            self._expressions(expression, scope, known)
        self._block(node.body, here, dict(known), node)

    def _base(
        self, node: ast.ClassDef, known: Mapping[str, _Typed]
    ) -> Definition | None:
        """The upstream class that a class of this file builds on."""
        for base in node.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            if name in known and known[name].definition.kind == "class":
                return known[name].definition
            local = self._local_classes.get(name)
            if local is not None and local is not node:
                found = self._base(local, known)
                if found is not None:
                    return found
        return None

    def _function(
        self,
        node: Function,
        scope: list[str],
        known: dict[str, _Typed],
        inside: ast.ClassDef | None,
    ) -> None:
        here = [*scope, node.name]
        if self.code.lines is not None and not self._ours(node):
            self._edited(node, here, inside)
        known = dict(known)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            known.pop(argument.arg, None)
            if argument.annotation is not None:
                self._annotate(argument.arg, argument.annotation, known)
        if inside is not None and arguments and arguments[0].arg == "self":
            typed = self._self_type(inside, known)
            if typed is not None:
                known["self"] = _Typed(typed, True)
        for expression in (
            *node.decorator_list,
            *(it.annotation for it in arguments if it.annotation),
            *node.args.defaults,
            *(it for it in node.args.kw_defaults if it),
            *([node.returns] if node.returns else []),
        ):
            self._expressions(expression, scope, known)
        self._block(node.body, here, known, None)

    def _self_type(
        self, inside: ast.ClassDef, known: Mapping[str, _Typed]
    ) -> Definition | None:
        if self.code.lines is None:
            return self._base(inside, known)
        return self.tree.find(self.module.name, inside.name)

    def _edited(
        self, node: Function, scope: list[str], inside: ast.ClassDef | None
    ) -> None:
        """An upstream function that a patch puts lines into."""
        added = set(self.code.lines or ())
        if not added.intersection(range(node.lineno, (node.end_lineno or 0) + 1)):
            return
        place = self.code.place(scope)
        owner, member = (inside.name, node.name) if inside else (node.name, None)
        if self.tree.find(self.module.name, owner) is not None:
            self.uses.append(Use(self.module.name, owner, member, How.EDIT, place))

    def _learn(self, statement: ast.stmt, known: dict[str, _Typed]) -> None:
        """The types of what a statement assigns."""
        if isinstance(statement, ast.AnnAssign) and isinstance(
            statement.target, ast.Name
        ):
            self._annotate(statement.target.id, statement.annotation, known)
        elif isinstance(statement, ast.Assign):
            typed = self._type(statement.value, known)
            if typed is None and isinstance(statement.value, ast.Subscript):
                # A name for a container type.
                held = self._annotated(statement.value, known)
                typed = held and _Typed(held.definition, False, held.depth)
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    known.pop(target.id, None)
                    if typed is not None:
                        known[target.id] = typed
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            self._iterate(statement.target, statement.iter, known)

    def _iterate(
        self, target: ast.expr, over: ast.expr, known: dict[str, _Typed]
    ) -> None:
        """The type of what a loop runs over."""
        typed = self._type(over, known)
        element = typed.element() if typed else None
        if isinstance(target, ast.Name):
            known.pop(target.id, None)
            if element is not None:
                known[target.id] = element

    def _bind(self, node: ast.AST, known: Mapping[str, _Typed]) -> Mapping[str, _Typed]:
        """The scope with what comprehensions and lambdas of an expression name."""
        bound = dict(known)
        for part in _expressions(node):
            for loop in getattr(part, "generators", []):
                self._iterate(loop.target, loop.iter, bound)
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
                for function, annotation in self._callbacks(part):
                    for argument, type_ in zip(
                        function.args.args, annotation, strict=False
                    ):
                        self._annotate(argument.arg, type_, bound)
        return bound

    def _callbacks(self, call: ast.Call) -> Iterator[tuple[ast.Lambda, list[ast.expr]]]:
        """Lambdas given to a record of ours, each with its arguments' types."""
        assert isinstance(call.func, ast.Name)
        record = self._local_classes.get(call.func.id)
        if record is None:
            return
        fields = {
            it.target.id: it.annotation
            for it in record.body
            if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name)
        }
        given = [
            *zip(fields, call.args, strict=False),
            *((it.arg, it.value) for it in call.keywords),
        ]
        for name, value in given:
            annotation = fields.get(name or "")
            if (
                isinstance(value, ast.Lambda)
                and isinstance(annotation, ast.Subscript)
                and isinstance(annotation.slice, ast.Tuple)
                and isinstance(annotation.slice.elts[0], ast.List)
            ):
                yield value, annotation.slice.elts[0].elts

    def _annotate(
        self, name: str, annotation: ast.expr, known: dict[str, _Typed]
    ) -> None:
        found = self._annotated(annotation, known)
        if found is not None:
            known[name] = found

    def _annotated(
        self, annotation: ast.expr, known: Mapping[str, _Typed]
    ) -> _Typed | None:
        """An object of the type that an annotation names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(annotation, ast.Subscript):
            outer, inner = annotation.value, annotation.slice
            if isinstance(inner, ast.Tuple):
                inner = inner.elts[0]
            if isinstance(outer, ast.Name) and outer.id in _CONTAINERS:
                held = self._annotated(inner, known)
                return held and _Typed(held.definition, True, held.depth + 1)
            return None
        if isinstance(annotation, ast.BinOp):
            return self._annotated(annotation.left, known) or self._annotated(
                annotation.right, known
            )
        if isinstance(annotation, ast.Name) and annotation.id in known:
            typed = known[annotation.id]
            if not typed.is_object and typed.definition.kind == "class":
                return _Typed(typed.definition, True, typed.depth)
        if self.code.lines is not None and isinstance(annotation, ast.Name):
            found = self.tree.find(self.module.name, annotation.id)
            if found is not None and found.kind == "class":
                return _Typed(found, True)
        return None

    def _type(self, expression: ast.expr, known: Mapping[str, _Typed]) -> _Typed | None:
        """What an expression is, where that can be told."""
        if isinstance(expression, ast.Name):
            return known.get(expression.id)
        if isinstance(expression, ast.Subscript):
            container = self._type(expression.value, known)
            if isinstance(expression.slice, ast.Slice):
                return container
            return container.element() if container else None
        if isinstance(expression, ast.Attribute):
            module = self._module_of(expression.value, known)
            if module is not None:
                found = self.tree.find(module, expression.attr)
                return _Typed(found, found.kind == "value") if found else None
            start = self._type(expression.value, known)
            if start is None:
                return None
            member = self._member(start, expression.attr)
            if member is None:
                return None
            if member.kind != "function":
                return self._held(member)
            if any(it.endswith("property") for it in member.decorators):
                return self._held(member)
            return _Typed(member, False)
        if isinstance(expression, ast.Call):
            called = self._type(expression.func, known)
            if called is None or called.is_object or called.depth:
                return None
            if called.definition.kind == "class":
                return _Typed(called.definition, True)
            return self._held(called.definition)
        return None

    def _held(self, of: Definition) -> _Typed | None:
        """The object that an attribute holds or a function returns."""
        found = None
        if of.annotation is not None:
            found = self.tree.resolve(of.annotation, of.module)
        elif isinstance(of.node, ast.Assign) and isinstance(of.node.value, ast.Call):
            found = self.tree.resolve(of.node.value.func, of.module)
        if found is not None and found.kind == "class":
            return _Typed(found, True)
        return None

    def _module_of(
        self, expression: ast.expr, known: Mapping[str, _Typed]
    ) -> str | None:
        """The module of upstream's that a name stands for."""
        if isinstance(expression, ast.Name) and expression.id not in known:
            return self._module_names.get(expression.id)
        return None

    def _class_of(self, typed: _Typed) -> Definition | None:
        if typed.depth:
            return None
        if typed.definition.kind == "class":
            return typed.definition
        if typed.is_object:
            held = self._held(typed.definition)
            return held.definition if held else None
        return None

    def _member(self, typed: _Typed, name: str) -> Definition | None:
        owner = self._class_of(typed)
        return self.tree.member(owner, name) if owner else None

    def _expressions(
        self, node: ast.AST, scope: list[str], known: Mapping[str, _Typed]
    ) -> None:
        known = self._bind(node, known)
        called = set()
        listed = set()
        for part in _expressions(node):
            if isinstance(part, ast.Call):
                called.add(part.func)
            elif isinstance(part, ast.Dict):
                listed |= {key for key in part.keys if key is not None}
        for part in _expressions(node):
            how = How.CALL if part in called else How.READ
            if isinstance(part, ast.Name) and part.id in known:
                self._named(part, how, part in listed, scope, known)
            elif isinstance(part, ast.Attribute):
                self._taken(part, how, scope, known)

    def _named(
        self,
        node: ast.Name,
        how: How,
        listed: bool,
        scope: list[str],
        known: Mapping[str, _Typed],
    ) -> None:
        definition = known[node.id].definition
        if definition.owner is not None or isinstance(node.ctx, ast.Store):
            return
        if listed and definition.qualname.endswith(BUILDER):
            how = How.RECORD
        if how != How.READ and not (known[node.id].is_object):
            key = (definition.module.name, definition.qualname)
            self._note(*key, None, how, node, scope)

    def _taken(
        self,
        node: ast.Attribute,
        how: How,
        scope: list[str],
        known: Mapping[str, _Typed],
    ) -> None:
        value = node.value
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id == "super"
        ):
            value = ast.Name("self", ast.Load())
        module = self._module_of(value, known)
        if module is not None:
            if self.tree.find(module, node.attr) is not None:
                self._note(module, node.attr, None, how, node, scope)
            return
        start = self._type(value, known)
        owner = self._class_of(start) if start is not None else None
        if owner is None or isinstance(node.ctx, ast.Store):
            return
        if self.tree.member(owner, node.attr) is not None:
            key = (owner.module.name, owner.qualname)
            self._note(*key, node.attr, how, node, scope)

    def _ours(self, node: ast.AST) -> bool:
        return self.code.lines is None or getattr(node, "lineno", 0) in self.code.lines

    def _note(
        self,
        module: str,
        name: str,
        member: str | None,
        how: How,
        node: ast.AST,
        scope: list[str],
    ) -> None:
        if self._ours(node):
            self.uses.append(Use(module, name, member, how, self.code.place(scope)))


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements inside it."""
    waiting = [node]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, ast.expr):
            yield part
        waiting += [
            child
            for child in ast.iter_child_nodes(part)
            if not isinstance(child, (ast.stmt, ast.excepthandler))
        ]
