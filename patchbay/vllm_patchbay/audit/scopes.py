"""What a name stands for at a place in a plugin: scopes, and the values that matter to an audit.

Almost everything a plugin computes is of no interest. Followed are imports and what is taken from them,
literals, vLLM's version, and conditions made from these; the rest is opaque.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_patchbay.audit.conditions import Condition, Reach, Ref


@dataclass(frozen=True, slots=True)
class Const:
    value: object
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """vLLM's version. `form`: text, version (a `Version`), tuple (of numbers, of which only the first `length` are
    left), fields (the same as strings), number and field (the one at `length`), parts (cut in another way)."""

    form: str
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Versioned:
    """Something made of vLLM's version, in a way that was not followed."""


@dataclass(frozen=True, slots=True)
class Range:
    """A set of version specifiers."""

    text: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A mark on a test: it runs only if the condition holds."""

    runs: Condition


@dataclass(frozen=True, slots=True)
class Instance:
    """Of a class, or the class itself, by dotted name; of one of several where that is not known."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of a function of the plugin or of one inside it. What is passed is seen where the function is used."""

    function: str


@dataclass(frozen=True, slots=True)
class Flag:
    condition: Condition


@dataclass(frozen=True, slots=True)
class Spec:
    """What find_spec returns for a module: None if there is none."""

    module: str


@dataclass(slots=True, eq=False)
class Literal:
    """A list, tuple, set or dictionary written out. Elements are evaluated where it was written."""

    node: ast.Dict | ast.List | ast.Tuple | ast.Set
    scope: Scope
    reach: Reach
    more: list[tuple[ast.expr, ast.expr]] = field(default_factory=list)
    """Items added to a dictionary later."""

    def pairs(self) -> list[tuple[ast.expr | None, ast.expr]]:
        if isinstance(self.node, ast.Dict):
            return [*zip(self.node.keys, self.node.values, strict=True), *self.more]
        return [(None, element) for element in self.node.elts]


@dataclass(frozen=True, slots=True)
class Opaque:
    pass


@dataclass(frozen=True, slots=True)
class Perhaps:
    """Something that is given at run time, and this of vLLM where nothing is."""

    path: str


Value: TypeAlias = (
    Ref | Const | Release | Versioned | Range | Skip | Instance | Parameter | Flag | Spec | Literal | Opaque | Perhaps
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A value, and under what circumstances it is that."""

    value: Value
    reach: Reach = ()


UNKNOWN_VALUE = [Alternative(Opaque())]
MADE_OF_VERSION = [Alternative(Versioned())]


class Scope:
    def __init__(self, parent: Scope | None, *, base: Reach = (), is_class: bool = False) -> None:
        self.parent = parent
        self.base = base
        self.is_class = is_class
        self.names: dict[str, list[Alternative]] = {}
        self.starred: list[str] = []
        """Modules whose names were imported with a star."""
        self.elsewhere: dict[str, Scope] = {}
        """Names declared global or nonlocal."""
        self.function: str = parent.function if parent is not None else ""
        """The outermost function around, by dotted name."""
        self.instances: tuple[str, ...] = ()
        """Of a class: what its instances are, by dotted name."""

    def bind(self, name: str, values: list[Alternative], reach: Reach) -> None:
        if name in self.elsewhere:
            # It runs when the function is called, if it is: what the name stood for before remains possible.
            self.elsewhere[name].names.setdefault(name, []).extend(values)
            return
        bound = [Alternative(value.value, (*reach, *_after(value.reach, reach))) for value in values]
        if reach == self.base:
            self.names[name] = bound
        else:
            self.names.setdefault(name, []).extend(bound)

    def lookup(self, name: str, reach: Reach) -> list[Alternative]:
        """What `name` may stand for where `reach` holds; empty if nothing here binds it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or not scope.is_class):
                found = []
                for alternative in reversed(scope.names[name]):
                    found.append(alternative)
                    if alternative.reach == reach[: len(alternative.reach)]:
                        # It holds for certain here, and hides what was bound before.
                        break
                return found
            scope = scope.parent
        return []

    def module_scope(self) -> Scope:
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


def _after(reach: Reach, prefix: Reach) -> Reach:
    return reach[len(prefix) :] if reach[: len(prefix)] == prefix else reach
