"""Resolves names and evaluates conditions of a plugin against one vLLM."""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_patchbay.audit.conditions import (
    All,
    Always,
    Any,
    Condition,
    Exists,
    ModuleExists,
    NamedFlag,
    Not,
    Ref,
    TryCompleted,
    TypeChecking,
    VersionIs,
    contains_guard,
)
from vllm_patchbay.audit.facts import Fact, ImportFact, Meaning, Meanings, Place, UseFact
from vllm_patchbay.audit.plugin import Plugin
from vllm_patchbay.upstream.source import SourceTree
from vllm_patchbay.upstream.survey import Survey, survey
from vllm_patchbay.upstream.symbols import Outcome, Resolution, SymbolIndex

_COMPARE: dict[str, Callable[[typing.Any, typing.Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CATCHING_TYPES: dict[str, frozenset[str]] = {
    "ModuleNotFoundError": frozenset({"ModuleNotFoundError", "ImportError", "Exception", "BaseException"}),
    "ImportError": frozenset({"ImportError", "Exception", "BaseException"}),
    "AttributeError": frozenset({"AttributeError", "Exception", "BaseException"}),
}
"""Exception classes that catch each exception."""


class VllmTarget:
    """Resolves names in one vLLM to audit against, together with the plugin."""

    def __init__(self, tree: SourceTree, plugin: Plugin) -> None:
        self.tree = tree
        self.plugin = plugin
        self.label = tree.version or tree.name
        """How reports name this vLLM."""
        self.index = SymbolIndex(tree)
        for package in plugin.packages:
            # A plugin that carries a package of vLLM's name does not replace the vLLM it is checked against.
            self.index.trees.setdefault(package, plugin.tree)

    @cached_property
    def survey(self) -> Survey:
        """Returns the class names, environment variables and entry-point groups of the whole vLLM."""
        return survey(self.tree)

    @cached_property
    def operands_of_functions(self) -> dict[str, frozenset[str]]:
        """Returns for each plugin function, by the dotted name of its definition, the vLLM objects that it is passed or
        assigned to."""
        found: dict[str, set[str]] = {}
        for function, path in self.plugin.operands:
            home = self.index.resolve_path(function) if "<" not in function else None
            key = f"{home.module}.{home.qualname}" if home is not None and home.is_found else function
            found.setdefault(key, set()).add(path)
        return {function: frozenset(paths) for function, paths in found.items()}

    @cached_property
    def operands_of_classes(self) -> dict[str, frozenset[str]]:
        """Returns for each plugin class the vLLM objects that the class or its methods are passed or assigned to."""
        found: dict[str, frozenset[str]] = {}
        for function, paths in self.operands_of_functions.items():
            for name in (function, function.rpartition(".")[0]):
                found[name] = found.get(name, frozenset()) | paths
        return found

    @cached_property
    def version(self) -> Version | None:
        """Returns this vLLM's version; None if the tree has none."""
        try:
            return Version(self.tree.version)
        except InvalidVersion:
            return None

    def depends_on_build(self, module: str) -> bool:
        """Returns whether vLLM itself imports the module, so that some builds of vLLM have it."""
        names = self.survey.imports
        return module in names or any(name.startswith(f"{module}.") for name in names)

    def find(self, ref: Ref) -> Resolution:
        """Resolves a dotted name, through the plugin's own modules if it begins there."""
        return self.index.resolve_path(ref.path)

    def is_bound_for_type_checkers(self, found: Resolution) -> bool:
        """Returns whether the module of a missing name binds it under ``TYPE_CHECKING``."""
        content = self.index.module(found.module)
        return content is not None and found.qualname in content.names

    def compare_version(self, condition: VersionIs) -> bool | None:
        """Returns whether a comparison holds for this vLLM's version; None if that cannot be decided."""
        version = self.version
        if version is None:
            return None
        compare = _COMPARE[condition.operator]
        if condition.form == "prefix":
            return str(version).startswith(str(condition.literal))
        if condition.form == "range":
            return SpecifierSet(str(condition.literal)).contains(Version(version.public), prereleases=True)
        if condition.form == "number":
            numbers = (*version.release, 0, 0)
            index = condition.length or 0
            return compare(numbers[index], condition.literal) if index < len(numbers) else None
        if condition.form == "tuple":
            numbers = version.release[: condition.length] if condition.length is not None else version.release
            return compare(numbers, condition.literal)
        if condition.form == "text" and condition.operator not in ("==", "!="):
            return compare(str(version), condition.literal)
        try:
            literal = Version(str(condition.literal))
        except InvalidVersion:
            return None
        # A local build counts as its release, because guards do not name local versions such as +cpu.
        release = Version(version.public) if literal.local is None else version
        return compare(release, literal)


@dataclass(frozen=True, slots=True)
class Reachability:
    """Records whether the line of a fact runs with one vLLM. ``TYPE_CHECKING`` counts as running."""

    runs: bool
    guarded: bool = False
    """Whether the line is behind a guard that the auditor cannot evaluate."""
    type_checking_only: bool = False


class ConditionEvaluator:
    """Evaluates conditions for the facts of one file against one vLLM."""

    def __init__(self, target: VllmTarget, facts: list[Fact]) -> None:
        self.target = target
        self.facts = facts
        self._known: dict[Condition, bool | None] = {}
        self._failures: dict[int, str | None] = {}

    def reachability(self, place: Place) -> Reachability:
        """Returns whether a place is reached with this vLLM."""
        guarded = False
        for condition in place.reach:
            if isinstance(condition, TypeChecking):
                return Reachability(True, type_checking_only=True)
            holds = self.holds(condition)
            if holds is False:
                return Reachability(False)
            guarded = guarded or (holds is None and contains_guard(condition, self._depends_on_version))
        return Reachability(True, guarded)

    def _depends_on_version(self, path: str) -> bool:
        known = self.target.plugin.version_dependent
        if path in known:
            return True
        found = self.target.index.resolve_path(path) if known else None
        return found is not None and f"{found.module}.{found.qualname}" in known

    def live_meanings(self, meanings: Meanings) -> list[Meaning]:
        """Returns the objects that a name may refer to with this vLLM, latest binding first.

        Bindings behind a false guard and imports that fail are left out. A binding that always runs hides earlier ones.
        """
        found = []
        for meaning in meanings:
            answers = [self.holds(condition) for condition in meaning.reach]
            if False not in answers and self.target.find(Ref(meaning.ref.base)).is_found:
                found.append(meaning)
                if None not in answers:
                    break
        return found

    def unknown_meanings(self, meanings: Meanings) -> list[tuple[Ref, str]]:
        """Returns the first object of vLLM that a name may refer to and that the source does not show, and why."""
        found = []
        for meaning in meanings:
            resolution = self.target.find(meaning.ref)
            is_unknown = resolution.outcome is Outcome.UNKNOWN and meaning.ref.root == "vllm"
            if is_unknown and not any(self.holds(condition) is False for condition in meaning.reach):
                found.append((meaning.ref, resolution.reason))
        return found[:1]

    def holds(self, condition: Condition) -> bool | None:
        """Returns whether a condition holds with this vLLM; None if that cannot be decided."""
        if condition not in self._known:
            self._known[condition] = None
            self._known[condition] = self._holds(condition)
        return self._known[condition]

    def _holds(self, condition: Condition) -> bool | None:
        if isinstance(condition, Always):
            return condition.value
        if isinstance(condition, TypeChecking):
            return False
        if isinstance(condition, VersionIs):
            return self.target.compare_version(condition)
        if isinstance(condition, Exists):
            return self._exists(condition.ref)
        if isinstance(condition, NamedFlag):
            flag = self._flag_condition(condition.path)
            return self.holds(flag) if flag is not None else None
        if isinstance(condition, ModuleExists):
            if condition.module.partition(".")[0] != "vllm":
                return None
            if self.target.tree.has(condition.module):
                return True
            return None if self.target.depends_on_build(condition.module) else False
        if isinstance(condition, Not):
            inner = self.holds(condition.condition)
            return None if inner is None else not inner
        if isinstance(condition, All):
            answers = [self.holds(part) for part in condition.conditions]
            return False if False in answers else (None if None in answers else True)
        if isinstance(condition, Any):
            answers = [self.holds(part) for part in condition.conditions]
            return True if True in answers else (None if None in answers else False)
        if isinstance(condition, TryCompleted):
            return self._try_completed(condition)
        return None

    def _flag_condition(self, path: str) -> Condition | None:
        flags = self.target.plugin.flags
        if path not in flags:
            # The name may be a re-export.
            call = "()" if path.endswith("()") else ""
            found = self.target.index.resolve_path(path.removesuffix("()"))
            path = f"{found.module}.{found.qualname}{call}"
        return flags.get(path)

    def _exists(self, ref: Ref) -> bool | None:
        if ref.root != "vllm" and ref.root not in self.target.plugin.packages:
            return None
        found = self.target.find(ref)
        return None if found.outcome is Outcome.UNKNOWN else found.is_found

    def _try_completed(self, condition: TryCompleted) -> bool | None:
        unsure = not condition.only_facts
        for number in range(condition.start, condition.stop):
            fact = self.facts[number]
            if not self.reachability(fact.place).runs:
                continue
            failure = self.failure(number)
            if failure is None:
                unsure = True
            elif failure and _CATCHING_TYPES[failure] & condition.catches:
                return False
        return None if unsure else True

    def failure(self, number: int) -> str | None:
        """Returns the exception that the fact of a number raises; empty if it raises none, None if that is unknown."""
        if number not in self._failures:
            self._failures[number] = self._failure(self.facts[number])
        return self._failures[number]

    def _failure(self, fact: Fact) -> str | None:
        if isinstance(fact, ImportFact):
            return import_failure(self.target, fact)
        if isinstance(fact, UseFact):
            live = self.live_meanings(fact.meanings)
            outcomes = {self.target.find(meaning.ref).outcome for meaning in live}
            if outcomes == {Outcome.MISSING}:
                return "AttributeError"
            return None if Outcome.UNKNOWN in outcomes else ""
        return ""

    def caught_at(self, place: Place, failure: str) -> tuple[bool, bool]:
        """Returns whether an enclosing try statement catches the exception, and whether it imports an alternative."""
        for catch in reversed(place.caught):
            if _CATCHING_TYPES[failure] & catch.exceptions:
                return True, catch.has_alternative
        return False, False


def import_failure(target: VllmTarget, fact: ImportFact) -> str | None:
    """Returns the exception that an import raises; empty if it raises none, None if that is unknown."""
    if not target.tree.has(fact.module):
        if fact.module in target.plugin.modules_provided:
            return ""
        return None if target.depends_on_build(fact.module) else "ModuleNotFoundError"
    if not fact.name:
        return ""
    found = target.index.resolve(fact.module, fact.name)
    if found.outcome is Outcome.UNKNOWN:
        return None
    if found.is_missing:
        submodule = f"{fact.module}.{fact.name}"
        if submodule in target.plugin.modules_provided:
            return ""
        return None if target.depends_on_build(submodule) else "ImportError"
    return ""
