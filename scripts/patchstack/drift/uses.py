"""What our code takes from upstream: found in the code itself, by reading it.

A name counts when it is imported; a member when the type of what it is taken
from can be told, by an annotation, a constructor call or the class we extend.
"""

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..errors import StackError
from .symbols import (
    FUNCTIONS,
    PACKAGE,
    Definition,
    Function,
    Module,
    SourceTree,
    attributes,
    links,
    unquoted,
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
    """A symbol of upstream's that we use."""

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

    def place(self, scope: Sequence[str]) -> str:
        """Return how a finding names a scope of it."""
        start = f"patches/{self.patch}" if self.patch else self.path
        return f"{start}: {'.'.join(scope) or 'top level'}"


def collect(
    code: Code, tree: SourceTree, own: Collection[str]
) -> tuple[list[Use], list[OwnClass]]:
    """Return uses and derived classes of a file; `own` are the paths of own files.

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


@dataclass(frozen=True)
class _Scope:
    """Where in our code we are."""

    names: tuple[str, ...] = ()
    known: dict[str, _Typed] = field(default_factory=dict)
    """What names stand for; learned as the scope is read."""
    inside: ast.ClassDef | None = None
    """The class whose body this is."""

    def within(self, name: str, inside: ast.ClassDef | None = None) -> "_Scope":
        """The scope of a class or function, with a copy of what is known."""
        return _Scope((*self.names, name), dict(self.known), inside)


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
        self._block(body, _Scope())

    def _block(self, body: list[ast.stmt], at: _Scope) -> None:
        for statement in body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self._imports(statement, at)
            elif isinstance(statement, ast.ClassDef):
                self._class(statement, at)
            elif isinstance(statement, FUNCTIONS):
                self._function(statement, at)
            else:
                self._expressions(statement, at)
                self._learn(statement, at)
                for part in ("body", "orelse", "finalbody"):
                    self._block(getattr(statement, part, []), at)
                for handler in getattr(statement, "handlers", []):
                    self._block(handler.body, at)

    def _imports(self, statement: ast.Import | ast.ImportFrom, at: _Scope) -> None:
        for name, link in links(statement, self.module.package):
            at.known.pop(name, None)
            if link.module.partition(".")[0] != PACKAGE or link.module in self.own:
                continue
            found = link.name and self.tree.find(link.module, link.name)
            if not found:
                whole = f"{link.module}.{link.name}" if link.name else link.module
                if whole not in self.own and self.tree.module(whole) is not None:
                    self._module_names[name] = whole
            elif link.name:
                at.known[name] = _Typed(found, found.kind == "value")
                self._note((link.module, link.name), None, How.IMPORT, statement, at)

    def _class(self, node: ast.ClassDef, at: _Scope) -> None:
        here = at.within(node.name, node)
        base = self._base(node, at)
        if base is not None and self._ours(node):
            members = Definition(self.module, "", node).members
            sets = frozenset({*attributes(node), *members})
            key = (base.module.name, base.qualname)
            self.classes.append(OwnClass(self.code.place(here.names), key, sets))
            self._note(key, None, How.EXTEND, node, here)
            for name, member in members.items():
                if self.tree.member(base, name) is not None:
                    self._note(key, name, How.OVERRIDE, member, here.within(name))
        for expression in (*node.bases, *node.decorator_list):
            self._expressions(expression, at)
        self._block(node.body, here)

    def _base(self, node: ast.ClassDef, at: _Scope) -> Definition | None:
        """The upstream class that a class of this file builds on."""
        for base in node.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            if name in at.known and at.known[name].definition.kind == "class":
                return at.known[name].definition
            local = self._local_classes.get(name)
            if local is not None and local is not node:
                found = self._base(local, at)
                if found is not None:
                    return found
        return None

    def _function(self, node: Function, at: _Scope) -> None:
        here = at.within(node.name)
        if self.code.lines is not None and not self._ours(node):
            self._edited(node, here, at.inside)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            here.known.pop(argument.arg, None)
            if argument.annotation is not None:
                self._annotate(argument.arg, argument.annotation, here)
        if at.inside is not None and arguments and arguments[0].arg == "self":
            typed = self._self_type(at.inside, here)
            if typed is not None:
                here.known["self"] = _Typed(typed, True)
        for expression in (
            *node.decorator_list,
            *(it.annotation for it in arguments if it.annotation),
            *node.args.defaults,
            *(it for it in node.args.kw_defaults if it),
            *([node.returns] if node.returns else []),
        ):
            self._expressions(expression, replace(here, names=at.names))
        self._block(node.body, here)

    def _self_type(self, inside: ast.ClassDef, at: _Scope) -> Definition | None:
        if self.code.lines is None:
            return self._base(inside, at)
        return self.tree.find(self.module.name, inside.name)

    def _edited(self, node: Function, at: _Scope, inside: ast.ClassDef | None) -> None:
        """An upstream function that a patch puts lines into."""
        added = set(self.code.lines or ())
        if not added.intersection(range(node.lineno, (node.end_lineno or 0) + 1)):
            return
        owner, member = (inside.name, node.name) if inside else (node.name, None)
        if self.tree.find(self.module.name, owner) is not None:
            place = self.code.place(at.names)
            self.uses.append(Use(self.module.name, owner, member, How.EDIT, place))

    def _learn(self, statement: ast.stmt, at: _Scope) -> None:
        """The types of what a statement assigns."""
        if isinstance(statement, ast.AnnAssign):
            if isinstance(statement.target, ast.Name):
                self._annotate(statement.target.id, statement.annotation, at)
        elif isinstance(statement, ast.Assign):
            typed = self._type(statement.value, at)
            if typed is None and isinstance(statement.value, ast.Subscript):
                # A name for a container type.
                held = self._annotated(statement.value, at)
                typed = held and replace(held, is_object=False)
            for target in statement.targets:
                self._bind(target, typed, at)
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            self._iterate(statement.target, statement.iter, at)

    def _iterate(self, target: ast.expr, over: ast.expr, at: _Scope) -> None:
        """The type of what a loop runs over."""
        typed = self._type(over, at)
        self._bind(target, typed.element() if typed else None, at)

    def _bind(self, target: ast.expr, typed: _Typed | None, at: _Scope) -> None:
        if isinstance(target, ast.Name):
            at.known.pop(target.id, None)
            if typed is not None:
                at.known[target.id] = typed

    def _with_bound(self, node: ast.AST, at: _Scope) -> _Scope:
        """The scope with what comprehensions and lambdas of an expression name."""
        bound = replace(at, known=dict(at.known))
        for part in _expressions(node):
            for loop in getattr(part, "generators", []):
                self._iterate(loop.target, loop.iter, bound)
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
                for function, types in self._callbacks(part, part.func.id):
                    for argument, type_ in zip(function.args.args, types, strict=False):
                        self._annotate(argument.arg, type_, bound)
        return bound

    def _callbacks(
        self, call: ast.Call, name: str
    ) -> Iterator[tuple[ast.Lambda, list[ast.expr]]]:
        """Lambdas given to a record of ours, each with its arguments' types."""
        record = self._local_classes.get(name)
        fields = {
            it.target.id: it.annotation
            for it in (record.body if record else ())
            if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name)
        }
        given = [
            *zip(fields, call.args, strict=False),
            *((it.arg, it.value) for it in call.keywords),
        ]
        for field_name, value in given:
            annotation = fields.get(field_name or "")
            if (
                isinstance(value, ast.Lambda)
                and isinstance(annotation, ast.Subscript)
                and isinstance(annotation.slice, ast.Tuple)
                and isinstance(annotation.slice.elts[0], ast.List)
            ):
                yield value, annotation.slice.elts[0].elts

    def _annotate(self, name: str, annotation: ast.expr, at: _Scope) -> None:
        found = self._annotated(annotation, at)
        if found is not None:
            at.known[name] = found

    def _annotated(self, annotation: ast.expr, at: _Scope) -> _Typed | None:
        """An object of the type that an annotation names."""
        annotation = unquoted(annotation)
        if isinstance(annotation, ast.Subscript):
            outer, inner = annotation.value, annotation.slice
            if isinstance(inner, ast.Tuple):
                inner = inner.elts[0]
            if not isinstance(outer, ast.Name) or outer.id not in _CONTAINERS:
                return None
            held = self._annotated(inner, at)
            return held and _Typed(held.definition, True, held.depth + 1)
        if isinstance(annotation, ast.BinOp):
            sides = (annotation.left, annotation.right)
            return next(filter(None, (self._annotated(it, at) for it in sides)), None)
        return self._named_type(annotation, at)

    def _named_type(self, annotation: ast.expr, at: _Scope) -> _Typed | None:
        if not isinstance(annotation, ast.Name):
            return None
        typed = at.known.get(annotation.id)
        if typed and not typed.is_object and typed.definition.kind == "class":
            return replace(typed, is_object=True)
        if self.code.lines is not None:
            found = self.tree.find(self.module.name, annotation.id)
            if found is not None and found.kind == "class":
                return _Typed(found, True)
        return None

    def _type(self, expression: ast.expr, at: _Scope) -> _Typed | None:
        """What an expression is, where that can be told."""
        if isinstance(expression, ast.Name):
            return at.known.get(expression.id)
        if isinstance(expression, ast.Subscript):
            container = self._type(expression.value, at)
            if isinstance(expression.slice, ast.Slice):
                return container
            return container.element() if container else None
        if isinstance(expression, ast.Attribute):
            return self._attribute(expression, at)
        if isinstance(expression, ast.Call):
            return self._returned(expression, at)
        return None

    def _attribute(self, expression: ast.Attribute, at: _Scope) -> _Typed | None:
        module = self._module_of(expression.value, at)
        if module is not None:
            found = self.tree.find(module, expression.attr)
            return _Typed(found, found.kind == "value") if found else None
        start = self._type(expression.value, at)
        owner = self._class_of(start) if start else None
        member = self.tree.member(owner, expression.attr) if owner else None
        if member is None:
            return None
        computed = any(it.endswith("property") for it in member.decorators)
        if member.kind != "function" or computed:
            return self._held(member)
        return _Typed(member, False)

    def _returned(self, expression: ast.Call, at: _Scope) -> _Typed | None:
        called = self._type(expression.func, at)
        if called is None or called.is_object or called.depth:
            return None
        if called.definition.kind == "class":
            return _Typed(called.definition, True)
        return self._held(called.definition)

    def _held(self, of: Definition) -> _Typed | None:
        """The object that an attribute holds or a function returns."""
        found = None
        if of.annotation is not None:
            found = self.tree.resolve(of.annotation, of.module)
        elif isinstance(of.node, ast.Assign) and isinstance(of.node.value, ast.Call):
            found = self.tree.resolve(of.node.value.func, of.module)
        return _Typed(found, True) if found and found.kind == "class" else None

    def _module_of(self, expression: ast.expr, at: _Scope) -> str | None:
        """The module of upstream's that a name stands for."""
        if isinstance(expression, ast.Name) and expression.id not in at.known:
            return self._module_names.get(expression.id)
        return None

    def _class_of(self, typed: _Typed) -> Definition | None:
        if typed.depth:
            return None
        if typed.definition.kind == "class":
            return typed.definition
        held = self._held(typed.definition) if typed.is_object else None
        return held.definition if held else None

    def _expressions(self, node: ast.AST, at: _Scope) -> None:
        bound = self._with_bound(node, at)
        called, listed = set(), set()
        for part in _expressions(node):
            if isinstance(part, ast.Call):
                called.add(part.func)
            elif isinstance(part, ast.Dict):
                listed |= {key for key in part.keys if key is not None}
        for part in _expressions(node):
            how = How.CALL if part in called else How.READ
            if isinstance(part, ast.Name) and part.id in bound.known:
                self._named(part, how, part in listed, bound)
            elif isinstance(part, ast.Attribute):
                self._taken(part, how, bound)

    def _named(self, node: ast.Name, how: How, listed: bool, at: _Scope) -> None:
        typed = at.known[node.id]
        definition = typed.definition
        if definition.owner is not None or isinstance(node.ctx, ast.Store):
            return
        if listed and definition.qualname.endswith(BUILDER):
            how = How.RECORD
        if how != How.READ and not typed.is_object:
            key = (definition.module.name, definition.qualname)
            self._note(key, None, how, node, at)

    def _taken(self, node: ast.Attribute, how: How, at: _Scope) -> None:
        value = node.value
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "super":
            value = ast.Name("self", ast.Load())
        module = self._module_of(value, at)
        if module is not None:
            if self.tree.find(module, node.attr) is not None:
                self._note((module, node.attr), None, how, node, at)
            return
        start = self._type(value, at)
        owner = self._class_of(start) if start is not None else None
        if owner is None or isinstance(node.ctx, ast.Store):
            return
        if self.tree.member(owner, node.attr) is not None:
            key = (owner.module.name, owner.qualname)
            self._note(key, node.attr, how, node, at)

    def _ours(self, node: ast.AST) -> bool:
        return self.code.lines is None or getattr(node, "lineno", 0) in self.code.lines

    def _note(
        self,
        key: tuple[str, str],
        member: str | None,
        how: How,
        node: ast.AST,
        at: _Scope,
    ) -> None:
        """Count a use of a symbol, by its module and name, if the code is ours."""
        if self._ours(node):
            self.uses.append(Use(*key, member, how, self.code.place(at.names)))


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
