"""Reads what one module binds from its syntax tree: names, classes and their members, imports, lazy names.

The syntax tree is not kept. A definition is recorded by its line numbers, and its source is read again when needed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_patchbay.upstream.signatures import Signature, signature_of_node


class Binds(StrEnum):
    """Names the kind of statement that binds a name."""

    CLASS = "class"
    FUNCTION = "function"
    PROPERTY = "property"
    IMPORT = "import"
    ASSIGNMENT = "assignment"
    ANNOTATION = "annotation"
    INSTANCE = "instance attribute"


class MethodKind(StrEnum):
    """Distinguishes whether a method gets the instance, the class or neither as its first argument."""

    INSTANCE = "instance"
    CLASS = "class"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class Symbol:
    """Describes one binding of a name. A name that several branches bind has several."""

    name: str
    binds: Binds
    line: int
    end_line: int
    for_type_checkers: bool = False
    """Whether it is bound only under ``if TYPE_CHECKING``, and so does not exist at run time."""
    conditional: bool = False
    """Whether it is bound in a branch, which may not run."""
    target: str = ""
    """Module of an import; for ``X = a.b``, the text ``a.b``."""
    attribute: str = ""
    """Imported name, for ``from target import attribute``."""
    signature: Signature | None = None
    method_kind: MethodKind = MethodKind.INSTANCE
    body: ClassBody | None = None


@dataclass(frozen=True, slots=True)
class ClassBody:
    """Holds the bases and the members of a class."""

    bases: tuple[str, ...]
    """Base classes as written, without subscripts; an empty string for an expression that is not a dotted name."""
    metaclass: str
    members: Mapping[str, tuple[Symbol, ...]]

    @property
    def has_dynamic_attributes(self) -> bool:
        """Returns whether ``__getattr__`` or ``__getattribute__`` may provide an attribute of any name."""
        return "__getattr__" in self.members or "__getattribute__" in self.members


@dataclass(slots=True)
class ModuleSymbols:
    """Holds the names that one module binds."""

    name: str
    is_package: bool
    names: dict[str, list[Symbol]] = field(default_factory=dict)
    star_imports: list[str] = field(default_factory=list)
    exported: frozenset[str] | None = None
    """Names in ``__all__`` if that is a literal, else None."""
    dictionaries: dict[str, frozenset[str]] = field(default_factory=dict)
    """Keys or elements of the literals at module level that have only string keys or elements."""
    is_lazy: bool = False
    """Whether the module has a ``__getattr__``."""
    lazy_names: frozenset[str] | None = None
    """Names that its ``__getattr__`` provides; None if the source does not show them, so that it may provide any."""

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


def read_module(name: str, source: str, *, is_package: bool) -> ModuleSymbols:
    """Returns what a module binds. Raises SyntaxError, ValueError, RecursionError or MemoryError for source that Python
    cannot parse."""
    module = ModuleSymbols(name, is_package)
    try:
        tree = ast.parse(source)
    except SystemError:
        # "AST constructor recursion depth mismatch": seen with Python 3.11 in a long test run, for valid source. The
        # cause is not known. A second failure is raised.
        tree = ast.parse(source)
    _Reader(module).block(tree.body, conditional=False, for_type_checkers=False)
    _read_lazy_names(module, tree)
    return module


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the child nodes, except those without fields (Load, Add, Eq…). It is several times faster than
    ``ast.iter_child_nodes``, and reading a tree spends most of its time here."""
    for name in node._fields:
        value = getattr(node, name, None)
        if type(value) is list:
            for element in value:
                if isinstance(element, ast.AST) and element._fields:
                    yield element
        elif isinstance(value, ast.AST) and value._fields:
            yield value


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and all nodes below it, in no particular order."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                pending += [element for element in value if isinstance(element, ast.AST) and element._fields]
            elif isinstance(value, ast.AST) and value._fields:
                pending.append(value)


def dotted(node: ast.expr) -> str:
    """Returns the text of a dotted name such as ``a.b.c``, or an empty string. Subscripts are dropped: ``Base[T]`` is
    ``Base``."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def absolute(package: str, level: int, module: str | None) -> str:
    """Returns the module that ``from ..module import`` refers to inside `package`, or an empty string if it is above
    the top-level package."""
    if level == 0:
        return module or ""
    parts = package.split(".") if package else []
    if level - 1 >= len(parts):
        return ""
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def is_type_checking(test: ast.expr) -> bool:
    """Returns whether the test of an ``if`` is ``TYPE_CHECKING``."""
    return dotted(test).rpartition(".")[2] == "TYPE_CHECKING"


def bound_names(target: ast.expr) -> Iterator[str]:
    """Yields the names that an assignment target binds."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from bound_names(element)
    elif isinstance(target, ast.Starred):
        yield from bound_names(target.value)


def strings_in(node: ast.expr | None) -> frozenset[str] | None:
    """Returns the keys of a dictionary or the elements of a list, tuple or set; None if one of them is not a literal
    string."""
    if isinstance(node, ast.Dict):
        elements: Iterable[ast.expr | None] = node.keys
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        elements = node.elts
    elif isinstance(node, ast.Call) and dotted(node.func) in ("frozenset", "set", "tuple", "list") and node.args:
        return strings_in(node.args[0])
    else:
        return None
    found = set()
    for element in elements:
        if not isinstance(element, ast.Constant) or not isinstance(element.value, str):
            return None
        found.add(element.value)
    return frozenset(found)


class _Reader:
    """Reads the statements that run when the module is imported."""

    def __init__(self, module: ModuleSymbols) -> None:
        self.module = module

    def block(self, statements: Iterable[ast.stmt], *, conditional: bool, for_type_checkers: bool) -> None:
        for statement in statements:
            if isinstance(statement, ast.If):
                checking = is_type_checking(statement.test)
                self.block(
                    statement.body,
                    conditional=conditional or not checking,
                    for_type_checkers=for_type_checkers or checking,
                )
                # Of 'if TYPE_CHECKING: … else: …', the second branch runs.
                self.block(
                    statement.orelse, conditional=conditional or not checking, for_type_checkers=for_type_checkers
                )
            else:
                for nested, is_branch in _blocks(statement):
                    self.block(nested, conditional=conditional or is_branch, for_type_checkers=for_type_checkers)
                self._record_star_import(statement)
                for symbol in symbols_of(statement, self.module.package, conditional, for_type_checkers):
                    self.module.names.setdefault(symbol.name, []).append(symbol)
                self._record_literal(statement)

    def _record_star_import(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names):
            self.module.star_imports.append(absolute(self.module.package, statement.level, statement.module))

    def _record_literal(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            if isinstance(statement, ast.AugAssign) and dotted(statement.target) in self.module.dictionaries:
                del self.module.dictionaries[dotted(statement.target)]
            if isinstance(statement, ast.AugAssign) and dotted(statement.target) == "__all__":
                self.module.exported = None
            return
        strings = strings_in(value)
        for target in targets:
            for name in bound_names(target):
                if strings is not None:
                    self.module.dictionaries[name] = strings
                else:
                    self.module.dictionaries.pop(name, None)
                if name == "__all__":
                    self.module.exported = strings


def _blocks(statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], bool]]:
    """Yields the blocks inside a statement other than ``if``, and whether each is a branch that may not run."""
    if isinstance(statement, (ast.Try, ast.TryStar)):
        yield statement.body, True
        for handler in statement.handlers:
            yield handler.body, True
        yield statement.orelse, True
        yield statement.finalbody, False
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        yield statement.body, False
    elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
        yield statement.body, True
        yield statement.orelse, True
    elif isinstance(statement, ast.Match):
        for case in statement.cases:
            yield case.body, True


def symbols_of(
    statement: ast.stmt, package: str, conditional: bool = False, for_type_checkers: bool = False
) -> Iterator[Symbol]:
    """Yields the names that one statement binds, except those that the blocks inside it bind."""
    line, end_line = statement.lineno, statement.end_lineno or statement.lineno

    def symbol(name: str, binds: Binds, **more: object) -> Symbol:
        return Symbol(
            name,
            binds,
            line,
            end_line,
            for_type_checkers,
            conditional,
            **more,  # type: ignore[arg-type]
        )

    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        line = min([line, *(decorator.lineno for decorator in statement.decorator_list)])
        decorators = {dotted(_called(d)).rpartition(".")[2] for d in statement.decorator_list}
        if "overload" in decorators:
            return
        if decorators & {"property", "cached_property", "getter"}:
            yield symbol(statement.name, Binds.PROPERTY, signature=signature_of_node(statement))
            return
        if decorators & {"setter", "deleter"}:
            yield symbol(statement.name, Binds.PROPERTY)
            return
        kind = MethodKind.CLASS if "classmethod" in decorators else MethodKind.INSTANCE
        kind = MethodKind.STATIC if "staticmethod" in decorators else kind
        yield symbol(statement.name, Binds.FUNCTION, signature=signature_of_node(statement), method_kind=kind)
    elif isinstance(statement, ast.ClassDef):
        line = min([line, *(decorator.lineno for decorator in statement.decorator_list)])
        yield symbol(statement.name, Binds.CLASS, body=class_body(statement, package))
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            yield symbol(name, Binds.IMPORT, target=alias.name if alias.asname else name)
    elif isinstance(statement, ast.ImportFrom):
        origin = absolute(package, statement.level, statement.module)
        for alias in statement.names:
            if alias.name != "*":
                yield symbol(alias.asname or alias.name, Binds.IMPORT, target=origin, attribute=alias.name)
    elif isinstance(statement, ast.Assign):
        alias_of = dotted(statement.value) if not isinstance(statement.value, ast.Subscript) else ""
        for target in statement.targets:
            for name in bound_names(target):
                yield symbol(name, Binds.ASSIGNMENT, target=alias_of if isinstance(target, ast.Name) else "")
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield symbol(statement.target.id, Binds.ASSIGNMENT if statement.value is not None else Binds.ANNOTATION)
    elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        yield symbol(statement.target.id, Binds.ASSIGNMENT)
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        for name in bound_names(statement.target):
            yield symbol(name, Binds.ASSIGNMENT)
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        for item in statement.items:
            if item.optional_vars is not None:
                for name in bound_names(item.optional_vars):
                    yield symbol(name, Binds.ASSIGNMENT)
    elif isinstance(statement, ast.TypeAlias if hasattr(ast, "TypeAlias") else ()):
        yield symbol(dotted(statement.name), Binds.ASSIGNMENT)


def class_body(node: ast.ClassDef, package: str, *, instances: bool = True) -> ClassBody:
    """Returns what a class binds; with `instances`, also the attributes that its methods set on `self`."""
    members: dict[str, list[Symbol]] = {}

    def collect(statements: Iterable[ast.stmt], conditional: bool, for_type_checkers: bool) -> None:
        for statement in statements:
            if isinstance(statement, ast.If):
                checking = is_type_checking(statement.test)
                collect(statement.body, conditional or not checking, for_type_checkers or checking)
                collect(statement.orelse, conditional or not checking, for_type_checkers)
                continue
            for nested, is_branch in _blocks(statement):
                collect(nested, conditional or is_branch, for_type_checkers)
            for symbol in symbols_of(statement, package, conditional, for_type_checkers):
                members.setdefault(symbol.name, []).append(symbol)
            if instances and isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for name, line, always_set in _self_attributes(statement):
                    known = members.get(name)
                    if known is None or (always_set and known[-1].binds is Binds.INSTANCE):
                        members[name] = [Symbol(name, Binds.INSTANCE, line, line, conditional=not always_set)]

    collect(node.body, False, False)
    metaclass = next((dotted(keyword.value) for keyword in node.keywords if keyword.arg == "metaclass"), "")
    return ClassBody(
        tuple(dotted(base) for base in node.bases),
        metaclass,
        {name: tuple(found) for name, found in members.items()},
    )


def _self_attributes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int, bool]]:
    """Yields the attributes that a method sets on its first argument: name, line, and whether creating an instance
    always sets it."""
    is_initializer = function.name in ("__init__", "__post_init__")
    top = {id(statement) for statement in function.body} if is_initializer else set()
    certain = {
        id(target)
        for statement in function.body
        if id(statement) in top and isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    }
    first = [*function.args.posonlyargs, *function.args.args]
    if not first:
        return
    receiver = first[0].arg
    for node in walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == receiver
        ):
            yield node.attr, node.lineno, id(node) in certain


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _read_lazy_names(module: ModuleSymbols, tree: ast.Module) -> None:
    """Records the names that the module's ``__getattr__`` provides. They are known if it looks the name up in literals
    of the module, and raises AttributeError for every other name."""
    if "__getattr__" not in module.names:
        return
    functions = [n for n in walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__getattr__"]
    functions = [f for f in functions if len(f.args.args) == 1]
    if not functions:
        return
    module.is_lazy = True
    known: set[str] = set()
    for function in functions:
        names = _names_provided_by(function, module.dictionaries)
        if names is None:
            return
        known |= names
    module.lazy_names = frozenset(known)


def _names_provided_by(function: ast.FunctionDef, literals: Mapping[str, frozenset[str]]) -> set[str] | None:
    """Returns the names that a ``__getattr__`` compares its argument with or looks up; None if they are not literals,
    or if the function does not raise AttributeError."""
    argument = function.args.args[0].arg
    known: set[str] = set()
    raises = False
    for node in walk(function):
        if isinstance(node, ast.Raise):
            raises = raises or (node.exc is not None and dotted(_called(node.exc)) == "AttributeError")
        elif isinstance(node, ast.Compare) and dotted(node.left) == argument:
            for operator, side in zip(node.ops, node.comparators, strict=True):
                names = _compared_names(operator, side, literals)
                if names is None:
                    return None
                known |= names
        elif isinstance(node, ast.Call) and node.args and dotted(node.args[0]) == argument:
            table, _, method = dotted(node.func).rpartition(".")
            if method == "get":
                if table not in literals:
                    return None
                known |= literals[table]
    return known if raises else None


def _compared_names(operator: ast.cmpop, side: ast.expr, literals: Mapping[str, frozenset[str]]) -> set[str] | None:
    """Returns the names on the other side of a comparison, or None if they are not literals."""
    if isinstance(operator, (ast.Eq, ast.NotEq)):
        return {side.value} if isinstance(side, ast.Constant) and isinstance(side.value, str) else None
    if not isinstance(operator, (ast.In, ast.NotIn)):
        return None
    if isinstance(side, ast.Call) and dotted(side.func) in ("globals", "vars"):
        return set()
    names = strings_in(side)
    if names is None:
        names = literals.get(dotted(side))
    return set(names) if names is not None else None
