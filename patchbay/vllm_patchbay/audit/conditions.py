"""Defines the conditions under which a line of a plugin runs, such as version guards, hasattr and failed imports.

A condition is a value that outlives the syntax tree it was read from. It is evaluated against each vLLM to true, false,
or None if the source alone does not decide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Ref:
    """Represents a dotted name that starts at an import.

    `base` is the name that the import statement gave, and is checked there. `rest` holds the attributes that are taken
    from it.
    """

    base: str
    rest: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Returns the whole dotted name."""
        return ".".join([self.base, *self.rest])

    @property
    def root(self) -> str:
        """Returns the top-level package of the name."""
        return self.base.partition(".")[0]

    def attribute(self, name: str) -> Ref:
        """Returns the dotted name of an attribute of this one."""
        return Ref(self.base, (*self.rest, name))


@dataclass(frozen=True, slots=True)
class Always:
    """Represents a constant condition: always true, or always false."""

    value: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """Represents a condition that the auditor cannot evaluate."""

    number: int
    """Distinguishes the conditions of different branches."""
    is_guard: bool = False
    """Whether the condition looks like a compatibility guard, rather than ordinary control flow."""
    names: tuple[str, ...] = ()
    """Dotted names of the plugin that the condition reads. It is also a guard if one of them depends on vLLM's
    version."""


@dataclass(frozen=True, slots=True)
class TypeChecking:
    """Represents ``TYPE_CHECKING``: false at run time, true for type checkers."""


@dataclass(frozen=True, slots=True)
class VersionIs:
    """Compares vLLM's version with a literal.

    `form` is version (compared by PEP 440), text (compared as strings), prefix, range (version specifiers), tuple (the
    first `length` numbers, or all of them if None), or number (the one at index `length`).
    """

    form: str
    operator: str
    literal: str | int | tuple[int, ...]
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Exists:
    """Is true if the dotted name resolves to something."""

    ref: Ref


@dataclass(frozen=True, slots=True)
class NamedFlag:
    """Refers to a boolean that the plugin stores in a module, or that one of its functions returns."""

    path: str
    """Dotted name of the variable or function; a function's ends with ``()``."""


@dataclass(frozen=True, slots=True)
class ModuleExists:
    """Is true if the module can be imported."""

    module: str


@dataclass(frozen=True, slots=True)
class TryCompleted:
    """Is true if the body of a try statement ran to its end.

    That is so if none of the file's facts from `start` to `stop` raised an exception that the statement catches.
    """

    start: int
    stop: int
    catches: frozenset[str]
    only_facts: bool
    """Whether nothing else in the body could have raised one."""


@dataclass(frozen=True, slots=True)
class Not:
    """Negates a condition."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class All:
    """Is true if every one of the conditions is."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Any:
    """Is true if at least one of the conditions is."""

    conditions: tuple[Condition, ...]


Condition: TypeAlias = (
    Always | Unknown | TypeChecking | VersionIs | Exists | NamedFlag | ModuleExists | TryCompleted | Not | All | Any
)
Reach: TypeAlias = tuple[Condition, ...]
"""When a line is reached: all of these conditions hold. Outermost first."""


def negated(condition: Condition) -> Condition:
    """Returns the negation of a condition, in its simplest form."""
    if isinstance(condition, Not):
        return condition.condition
    if isinstance(condition, Always):
        return Always(not condition.value)
    return Not(condition)


def is_portable(condition: Condition) -> bool:
    """Returns whether a condition means the same in another file of the plugin."""
    if isinstance(condition, Not):
        return is_portable(condition.condition)
    if isinstance(condition, (All, Any)):
        return all(map(is_portable, condition.conditions))
    return not isinstance(condition, (Unknown, TryCompleted))


def contains_guard(condition: Condition, depends_on_version: Callable[[str], bool]) -> bool:
    """Returns whether an undecided condition contains a compatibility guard, not only ordinary control flow."""
    if isinstance(condition, Unknown):
        return condition.is_guard or any(map(depends_on_version, condition.names))
    if isinstance(condition, Not):
        return contains_guard(condition.condition, depends_on_version)
    if isinstance(condition, (All, Any)):
        return any(contains_guard(part, depends_on_version) for part in condition.conditions)
    return not isinstance(condition, Always)
