"""What a source tree defines: modules, classes, functions, read from their text.

Nothing is imported, so that two releases can be looked at side by side on a
machine that can run neither.  Names are followed through imports; what is not
Python of the package (compiled, generated, another project's) is unknown.
"""

import ast
import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

PACKAGE = "vllm"

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Read = Callable[[str], bytes | None]
"""Text of a file by its path in the tree; None where there is none."""


@dataclass(frozen=True)
class Link:
    """A name that an import brings: from a module, or the module itself."""

    module: str
    name: str | None


class Module:
    """The top level of a module: what each name stands for there."""

    def __init__(self, name: str, text: str, is_package: bool) -> None:
        """Read a module's text; raises `SyntaxError` if it is not valid Python."""
        self.name = name
        self.package = name if is_package else name.rpartition(".")[0]
        with warnings.catch_warnings():
            # What upstream's text makes Python warn of is upstream's.
            warnings.simplefilter("ignore")
            self.tree = ast.parse(text)
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.links: dict[str, list[Link]] = {}
        self.stars: list[str] = []
        for statement in _statements(self.tree.body):
            self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for name, link in links(statement, self.package):
                if name == "*":
                    self.stars.append(link.module)
                else:
                    self.links.setdefault(name, []).append(link)
        elif isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            self.definitions.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            for name in _targets(statement):
                self.definitions.setdefault(name, []).append(statement)


def links(
    statement: ast.Import | ast.ImportFrom, package: str
) -> Iterator[tuple[str, Link]]:
    """Local name and origin of each thing that a statement imports."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            yield name, Link(alias.name if alias.asname else name, None)
        return
    module = statement.module or ""
    if statement.level:
        parts = package.split(".")
        parts = parts[: len(parts) - statement.level + 1]
        module = ".".join([*parts, module] if module else parts)
    for alias in statement.names:
        yield alias.asname or alias.name, Link(module, alias.name)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the branches in it."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _statements(statement.body)
            yield from _statements(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _targets(statement: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    if isinstance(statement, ast.AnnAssign):
        targets: list[ast.expr] = [statement.target]
    else:
        targets = statement.targets
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


@dataclass(frozen=True)
class Definition:
    """A class, function or value of a module, or a member of a class."""

    module: Module
    qualname: str
    node: ast.AST
    owner: "Definition | None" = None

    @property
    def name(self) -> str:
        """Its full name."""
        return f"{self.module.name}.{self.qualname}"

    @property
    def kind(self) -> str:
        """Class, function or value."""
        if isinstance(self.node, ast.ClassDef):
            return "class"
        return "function" if isinstance(self.node, FUNCTIONS) else "value"

    @cached_property
    def decorators(self) -> list[str]:
        """What it is decorated with."""
        return [ast.unparse(it) for it in getattr(self.node, "decorator_list", [])]

    @cached_property
    def bases(self) -> list[str]:
        """The base classes of a class."""
        return [ast.unparse(it) for it in getattr(self.node, "bases", [])]

    @cached_property
    def signature(self) -> str:
        """Arguments with defaults and annotations; of a value its annotation."""
        node = self.node
        if isinstance(node, FUNCTIONS):
            start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
            end = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return f"{start}({ast.unparse(node.args)}){end}"
        if isinstance(node, ast.AnnAssign):
            return f": {ast.unparse(node.annotation)}"
        return ""

    @cached_property
    def digest(self) -> str:
        """Hash of what is executed: comments, layout, docstrings do not count."""
        if isinstance(self.node, FUNCTIONS):
            parts: list[ast.AST] = list(without_docstring(self.node.body))
        else:
            value = getattr(self.node, "value", None)
            parts = [value] if isinstance(value, ast.AST) else []
        dumped = "\n".join(ast.dump(_bare(part)) for part in parts)
        return hashlib.sha256(dumped.encode()).hexdigest()

    @property
    def annotation(self) -> ast.expr | None:
        """What it holds, or returns when called."""
        if isinstance(self.node, FUNCTIONS):
            return self.node.returns
        if isinstance(self.node, ast.AnnAssign):
            return self.node.annotation
        return None

    @cached_property
    def members(self) -> dict[str, ast.AST]:
        """What the body of a class defines, by name."""
        found: dict[str, ast.AST] = {}
        if isinstance(self.node, ast.ClassDef):
            for statement in _statements(self.node.body):
                if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                    # A property's setter must not stand for its getter.
                    found.setdefault(statement.name, statement)
                elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                    found |= dict.fromkeys(_targets(statement), statement)
        return found

    @cached_property
    def attributes(self) -> dict[str, ast.AST]:
        """What the methods of a class set on `self`, by name: the first time."""
        return attributes(self.node)


def attributes(node: ast.AST) -> dict[str, ast.AST]:
    """Return what is set on `self` somewhere in a node, by name: the first time."""
    found: dict[str, ast.AST] = {}
    for statement in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            for part in ast.walk(target):
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    found.setdefault(part.attr, statement)
    return found


def unquoted(annotation: ast.expr) -> ast.expr:
    """Return an annotation out of its quotes, if it has any and is valid."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        with suppress(SyntaxError):
            return ast.parse(annotation.value, mode="eval").body
    return annotation


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a body but for its docstring."""
    first = body[0] if body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return body[1:]
    return body


def _bare(node: ast.AST) -> ast.AST:
    """The node; docstrings of functions inside it are taken out."""
    for part in ast.walk(node):
        if isinstance(part, (*FUNCTIONS, ast.ClassDef)):
            part.body = without_docstring(part.body) or [ast.Pass()]
    return node


class SourceTree:
    """The modules of a release, parsed when they are asked for."""

    def __init__(self, read: Read) -> None:
        """Use the texts that `read` gives."""
        self._read = read
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return a module of the package; None for what cannot be read."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> Module | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        path = name.replace(".", "/")
        for file, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            data = self._read(file)
            if data is None:
                continue
            try:
                return Module(name, data.decode(), is_package)
            except (SyntaxError, ValueError):
                # Meant for a newer Python than this one: nothing can be told.
                return None
        return None

    def find(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Definition | None:
        """Return what a name of a module stands for, wherever it is defined."""
        there = self.module(module)
        if there is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        statements = there.definitions.get(name, [])
        whole = [it for it in statements if isinstance(it, (*FUNCTIONS, ast.ClassDef))]
        if whole:
            return Definition(there, name, whole[0])
        named = (it for it in there.links.get(name, []) if it.name is not None)
        imported = (self.find(it.module, it.name or "", seen) for it in named)
        values = (Definition(there, name, it) for it in statements)
        starred = (self.find(star, name, seen) for star in there.stars)
        return next(filter(None, chain(imported, values, starred)), None)

    def lineage(self, of: Definition) -> Iterator[Definition]:
        """A class and the classes it is made from, as far as they are known."""
        seen = set()
        waiting = [of]
        while waiting:
            current = waiting.pop(0)
            if current.name in seen or not isinstance(current.node, ast.ClassDef):
                continue
            seen.add(current.name)
            yield current
            for base in current.node.bases:
                found = self.resolve(base, current.module)
                if found is not None:
                    waiting.append(found)

    def member(self, of: Definition, name: str) -> Definition | None:
        """A member of a class, its own or inherited."""
        for current in self.lineage(of):
            for table in (current.members, current.attributes):
                if name in table:
                    qualname = f"{current.qualname}.{name}"
                    return Definition(current.module, qualname, table[name], current)
        return None

    def resolve(self, expression: ast.expr, module: Module) -> Definition | None:
        """The class or function that an expression at a module's top level names."""
        expression = unquoted(expression)
        if isinstance(expression, ast.Subscript):
            outer = expression.value
            named = outer.id if isinstance(outer, ast.Name) else ""
            held = named in ("Optional", "type", "Type")
            return self.resolve(expression.slice if held else outer, module)
        if isinstance(expression, ast.BinOp):
            sides = (expression.left, expression.right)
            found = (self.resolve(it, module) for it in sides)
            return next(filter(None, found), None)
        if isinstance(expression, ast.Name):
            return self.find(module.name, expression.id)
        if isinstance(expression, ast.Attribute):
            target = self._module_named(expression.value, module)
            return self.find(target, expression.attr) if target else None
        return None

    def _module_named(self, expression: ast.expr, module: Module) -> str | None:
        if isinstance(expression, ast.Name):
            for link in module.links.get(expression.id, []):
                name = (
                    link.module if link.name is None else f"{link.module}.{link.name}"
                )
                if self.module(name) is not None:
                    return name
        elif isinstance(expression, ast.Attribute):
            start = self._module_named(expression.value, module)
            if start and self.module(f"{start}.{expression.attr}"):
                return f"{start}.{expression.attr}"
        return None
