"""Under what circumstances a line of a plugin runs: version guards, hasattr, imports that succeeded or failed.

A condition is a value that outlives the syntax tree it was read from and is evaluated against each vLLM: true,
false, or None where source does not tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Ref:
    """A dotted name that starts at an import.

    `base` is what the import named, and is checked where it was imported; `rest` are the attributes taken from it.
    """

    base: str
    rest: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return ".".join([self.base, *self.rest])

    @property
    def root(self) -> str:
        return self.base.partition(".")[0]

    def attribute(self, name: str) -> Ref:
        return Ref(self.base, (*self.rest, name))


@dataclass(frozen=True, slots=True)
class Always:
    """Or never."""

    value: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing is known of it. `is_guard` tells a guard that was not understood from ordinary control flow; `number`
    tells one branch from another."""

    number: int
    is_guard: bool = False
    names: tuple[str, ...] = ()
    """Of the plugin, by dotted name, that it asks: a guard too if one of them is made of vLLM's version."""


@dataclass(frozen=True, slots=True)
class TypeChecking:
    """Never at run time, and still read by type checkers."""


@dataclass(frozen=True, slots=True)
class VersionIs:
    """vLLM's version compared with a literal. `form`: version (PEP 440), text (as a string), prefix, range
    (specifiers), tuple (the first `length` numbers, all of them if None), or number (that at `length`)."""

    form: str
    operator: str
    literal: str | int | tuple[int, ...]
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Exists:
    """The name leads to something."""

    ref: Ref


@dataclass(frozen=True, slots=True)
class Named:
    """A flag of the plugin's own, by the dotted name of where it is kept; with () for what a function returns."""

    path: str


@dataclass(frozen=True, slots=True)
class ModuleExists:
    module: str


@dataclass(frozen=True, slots=True)
class Ran:
    """The body of a try statement ran to its end: none of the facts from `start` to `stop` raised what is caught."""

    start: int
    stop: int
    catches: frozenset[str]
    only_facts: bool
    """Nothing else in the body could have raised it."""


@dataclass(frozen=True, slots=True)
class Not:
    condition: Condition


@dataclass(frozen=True, slots=True)
class All:
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Any:
    conditions: tuple[Condition, ...]


Condition: TypeAlias = (
    Always | Unknown | TypeChecking | VersionIs | Exists | Named | ModuleExists | Ran | Not | All | Any
)
Reach: TypeAlias = tuple[Condition, ...]
"""All of these hold where a line runs."""


def negated(condition: Condition) -> Condition:
    if isinstance(condition, Not):
        return condition.condition
    if isinstance(condition, Always):
        return Always(not condition.value)
    return Not(condition)


def is_portable(condition: Condition) -> bool:
    """Whether it means the same in another file."""
    if isinstance(condition, Not):
        return is_portable(condition.condition)
    if isinstance(condition, (All, Any)):
        return all(map(is_portable, condition.conditions))
    return not isinstance(condition, (Unknown, Ran))


def mentions_guard(condition: Condition, is_of_version: Callable[[str], bool]) -> bool:
    """Whether an undecided condition is a guard, rather than ordinary control flow."""
    if isinstance(condition, Unknown):
        return condition.is_guard or any(map(is_of_version, condition.names))
    if isinstance(condition, Not):
        return mentions_guard(condition.condition, is_of_version)
    if isinstance(condition, (All, Any)):
        return any(mentions_guard(part, is_of_version) for part in condition.conditions)
    return not isinstance(condition, Always)
