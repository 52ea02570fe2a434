"""Defines scopes and the values that a name may hold at a line of a plugin, as far as an audit evaluates them.

Most values that a plugin computes do not matter to an audit. It evaluates imports and their attributes, literals,
vLLM's version, and conditions built from these. Every other value is opaque.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_patchbay.audit.conditions import Condition, Reach, Ref


@dataclass(frozen=True, slots=True)
class Const:
    """Represents a literal number, string or tuple of numbers, and where the source has it."""

    value: object
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class VllmVersion:
    """Represents vLLM's version, or a part of it.

    `form` is text, version (a `packaging.version.Version`), tuple (its numbers, cut to the first `length`), fields (the
    same as strings), number or field (the one at index `length`), or parts (the text split in another way).
    """

    form: str
    length: int | None = None


@dataclass(frozen=True, slots=True)
class VersionDerived:
    """Represents a value computed from vLLM's version in a way that the auditor does not evaluate."""


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Represents a set of version specifiers."""

    text: str


@dataclass(frozen=True, slots=True)
class Skip:
    """Represents a skip mark of pytest or unittest: the marked test runs only if the condition holds."""

    runs: Condition


@dataclass(frozen=True, slots=True)
class Instance:
    """Represents an instance of a class, or the class itself."""

    paths: tuple[str, ...]
    """Dotted name of the class; several names if it may be any of them."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Represents a parameter of a plugin function, or of a function nested in it. Its callers decide what it holds."""

    function: str
    """Dotted name of the outermost function."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Represents a boolean that is true if the condition holds."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """Represents the result of ``find_spec`` for a module: None if the module does not exist."""

    module: str


@dataclass(slots=True, eq=False)
class Literal:
    """Represents a list, tuple, set or dictionary display. Its elements are evaluated in the display's scope."""

    node: ast.Dict | ast.List | ast.Tuple | ast.Set
    scope: Scope
    reach: Reach
    more: list[tuple[ast.expr, ast.expr]] = field(default_factory=list)
    """Items that later statements add to a dictionary."""

    def pairs(self) -> list[tuple[ast.expr | None, ast.expr]]:
        """Returns the keys and values; the keys of a list, tuple or set are None."""
        if isinstance(self.node, ast.Dict):
            return [*zip(self.node.keys, self.node.values, strict=True), *self.more]
        return [(None, element) for element in self.node.elts]


@dataclass(frozen=True, slots=True)
class Opaque:
    """Represents a value that the auditor does not evaluate."""


@dataclass(frozen=True, slots=True)
class ParameterDefault:
    """Represents a parameter whose default is an object of vLLM. A caller may pass another object."""

    path: str
    """Dotted name of the default."""


Value: TypeAlias = (
    Ref
    | Const
    | VllmVersion
    | VersionDerived
    | VersionRange
    | Skip
    | Instance
    | Parameter
    | Flag
    | ModuleSpec
    | Literal
    | Opaque
    | ParameterDefault
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Represents one value that an expression may have, and the conditions under which it has that value."""

    value: Value
    reach: Reach = ()


UNKNOWN_VALUE = [Alternative(Opaque())]
VERSION_DERIVED = [Alternative(VersionDerived())]


class Scope:
    """Holds the names that a module, class or function binds."""

    def __init__(self, parent: Scope | None, *, base: Reach = (), is_class: bool = False) -> None:
        self.parent = parent
        self.base = base
        self.is_class = is_class
        self.names: dict[str, list[Alternative]] = {}
        self.star_imports: list[str] = []
        """Modules that ``from module import *`` names."""
        self.outer_names: dict[str, Scope] = {}
        """Names that are declared global or nonlocal, and the scope that holds them."""
        self.function: str = parent.function if parent is not None else ""
        """Dotted name of the outermost enclosing function."""
        self.instances: tuple[str, ...] = ()
        """For the scope of a class: dotted names of the class that its instances have, or of its bases."""

    def bind(self, name: str, values: list[Alternative], reach: Reach) -> None:
        """Binds a name, as a statement that is reached under `reach` does. Earlier bindings stay possible unless the
        statement always runs."""
        if name in self.outer_names:
            # The binding runs only if the function is called, so earlier values remain possible.
            self.outer_names[name].names.setdefault(name, []).extend(values)
            return
        bound = [Alternative(value.value, (*reach, *_without_prefix(value.reach, reach))) for value in values]
        if reach == self.base:
            self.names[name] = bound
        else:
            self.names.setdefault(name, []).extend(bound)

    def lookup(self, name: str, reach: Reach) -> list[Alternative]:
        """Returns the values that `name` may have where `reach` holds, latest binding first; empty if it is unbound."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or not scope.is_class):
                found = []
                for alternative in reversed(scope.names[name]):
                    found.append(alternative)
                    if alternative.reach == reach[: len(alternative.reach)]:
                        # This binding always ran before, and hides the earlier ones.
                        break
                return found
            scope = scope.parent
        return []

    def module_scope(self) -> Scope:
        """Returns the outermost scope around this one."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


def _without_prefix(reach: Reach, prefix: Reach) -> Reach:
    return reach[len(prefix) :] if reach[: len(prefix)] == prefix else reach
