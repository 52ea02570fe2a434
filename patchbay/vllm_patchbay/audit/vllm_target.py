"""One vLLM to audit against, and the answers it gives about names, versions and guards."""

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
    Named,
    Not,
    Ran,
    Ref,
    TypeChecking,
    VersionIs,
    mentions_guard,
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
_KINDS_OF = {
    "ModuleNotFoundError": frozenset({"ModuleNotFoundError", "ImportError", "Exception", "BaseException"}),
    "ImportError": frozenset({"ImportError", "Exception", "BaseException"}),
    "AttributeError": frozenset({"AttributeError", "Exception", "BaseException"}),
}


class Target:
    def __init__(self, tree: SourceTree, plugin: Plugin) -> None:
        self.tree = tree
        self.plugin = plugin
        self.label = tree.version or tree.name
        self.index = SymbolIndex(tree)
        for package in plugin.packages:
            # A plugin that carries a package of vLLM's name does not replace the vLLM it is checked against.
            self.index.trees.setdefault(package, plugin.tree)

    @cached_property
    def survey(self) -> Survey:
        return survey(self.tree)

    @cached_property
    def takers(self) -> dict[str, frozenset[str]]:
        """Functions of the plugin where they are defined, and what of vLLM they are given."""
        found: dict[str, set[str]] = {}
        for function, path in self.plugin.takes:
            home = self.index.resolve_path(function) if "<" not in function else None
            key = f"{home.module}.{home.qualname}" if home is not None and home.is_found else function
            found.setdefault(key, set()).add(path)
        return {function: frozenset(paths) for function, paths in found.items()}

    @cached_property
    def lenders(self) -> dict[str, frozenset[str]]:
        """Classes of the plugin, and onto what of vLLM they or their methods are put."""
        found: dict[str, frozenset[str]] = {}
        for function, paths in self.takers.items():
            for name in (function, function.rpartition(".")[0]):
                found[name] = found.get(name, frozenset()) | paths
        return found

    @cached_property
    def version(self) -> Version | None:
        try:
            return Version(self.tree.version)
        except InvalidVersion:
            return None

    def depends_on_build(self, module: str) -> bool:
        """Whether vLLM itself imports the module, so that another build of it has it."""
        names = self.survey.imports
        return module in names or any(name.startswith(f"{module}.") for name in names)

    def find(self, ref: Ref, *, for_types: bool = False) -> Resolution:
        found = self.index.resolve_path(ref.path)
        if found.is_missing and for_types and self.is_for_types(found):
            return Resolution(Outcome.FOUND, found.module, found.qualname)
        return found

    def is_for_types(self, found: Resolution) -> bool:
        content = self.index.module(found.module)
        return content is not None and found.qualname in content.names

    def compare_version(self, condition: VersionIs) -> bool | None:
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
            mine = version.release[: condition.length] if condition.length is not None else version.release
            return compare(mine, condition.literal)
        if condition.form == "text" and condition.operator not in ("==", "!="):
            return compare(str(version), condition.literal)
        try:
            literal = Version(str(condition.literal))
        except InvalidVersion:
            return None
        # A local build of a release is that release: nobody writes +cpu into a guard.
        mine_public = Version(version.public) if literal.local is None else version
        return compare(mine_public, literal)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a fact stands: whether its line runs at all, and whether something guards it."""

    runs: bool
    guarded: bool = False
    for_types: bool = False


class Judge:
    """Evaluates conditions for the facts of one file."""

    def __init__(self, target: Target, facts: list[Fact]) -> None:
        self.target = target
        self.facts = facts
        self._known: dict[Condition, bool | None] = {}
        self._failures: dict[int, str | None] = {}

    def standing(self, place: Place) -> Standing:
        guarded = False
        for condition in place.reach:
            if isinstance(condition, TypeChecking):
                return Standing(True, for_types=True)
            holds = self.holds(condition)
            if holds is False:
                return Standing(False)
            guarded = guarded or (holds is None and mentions_guard(condition, self._is_of_version))
        return Standing(True, guarded)

    def _is_of_version(self, path: str) -> bool:
        known = self.target.plugin.of_version
        if path in known:
            return True
        found = self.target.index.resolve_path(path) if known else None
        return found is not None and f"{found.module}.{found.qualname}" in known

    def live(self, meanings: Meanings) -> list[Meaning]:
        """What the name may stand for with this vLLM: not behind a guard that is false, nor an import that fails. What
        was bound last comes first, and hides the rest if it was bound for certain."""
        found = []
        for meaning in meanings:
            answers = [self.holds(condition) for condition in meaning.reach]
            if False not in answers and self.target.find(Ref(meaning.ref.base)).is_found:
                found.append(meaning)
                if None not in answers:
                    break
        return found

    def unknown(self, meanings: Meanings) -> list[tuple[Ref, str]]:
        """What of vLLM the name may stand for that cannot be looked into, and why."""
        found = []
        for meaning in meanings:
            resolution = self.target.find(meaning.ref)
            is_unknown = resolution.outcome is Outcome.UNKNOWN and meaning.ref.root == "vllm"
            if is_unknown and not any(self.holds(condition) is False for condition in meaning.reach):
                found.append((meaning.ref, resolution.reason))
        return found[:1]

    def holds(self, condition: Condition) -> bool | None:
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
        if isinstance(condition, Named):
            kept = self._kept(condition.path)
            return self.holds(kept) if kept is not None else None
        if isinstance(condition, ModuleExists):
            if condition.module.partition(".")[0] != "vllm":
                return None
            return (
                self.target.tree.has(condition.module) or None
                if self._is_optional(condition.module)
                else (self.target.tree.has(condition.module))
            )
        if isinstance(condition, Not):
            inner = self.holds(condition.condition)
            return None if inner is None else not inner
        if isinstance(condition, All):
            answers = [self.holds(part) for part in condition.conditions]
            return False if False in answers else (None if None in answers else True)
        if isinstance(condition, Any):
            answers = [self.holds(part) for part in condition.conditions]
            return True if True in answers else (None if None in answers else False)
        if isinstance(condition, Ran):
            return self._ran(condition)
        return None

    def _kept(self, path: str) -> Condition | None:
        flags = self.target.plugin.flags
        if path not in flags:
            # Through a re-export, perhaps.
            call = "()" if path.endswith("()") else ""
            found = self.target.index.resolve_path(path.removesuffix("()"))
            path = f"{found.module}.{found.qualname}{call}"
        return flags.get(path)

    def _is_optional(self, module: str) -> bool:
        return not self.target.tree.has(module) and self.target.depends_on_build(module)

    def _exists(self, ref: Ref) -> bool | None:
        if ref.root != "vllm" and ref.root not in self.target.plugin.packages:
            return None
        found = self.target.find(ref)
        return None if found.outcome is Outcome.UNKNOWN else found.is_found

    def _ran(self, condition: Ran) -> bool | None:
        unsure = not condition.only_facts
        for number in range(condition.start, condition.stop):
            fact = self.facts[number]
            if not self.standing(fact.place).runs:
                continue
            failure = self.failure(number)
            if failure is None:
                unsure = True
            elif failure and _KINDS_OF[failure] & condition.catches:
                return False
        return None if unsure else True

    def failure(self, number: int) -> str | None:
        """The exception that a fact raises; empty if none, None if that is not known."""
        if number not in self._failures:
            self._failures[number] = self._failure(self.facts[number])
        return self._failures[number]

    def _failure(self, fact: Fact) -> str | None:
        if isinstance(fact, ImportFact):
            return import_failure(self.target, fact)
        if isinstance(fact, UseFact):
            live = self.live(fact.meanings)
            outcomes = {self.target.find(meaning.ref).outcome for meaning in live}
            if outcomes == {Outcome.MISSING}:
                return "AttributeError"
            return None if Outcome.UNKNOWN in outcomes else ""
        return ""

    def swallowed(self, place: Place, failure: str) -> tuple[bool, bool]:
        """Whether an enclosing try catches the exception, and whether it then tries something else."""
        for catch in reversed(place.caught):
            if _KINDS_OF[failure] & catch.exceptions:
                return True, catch.has_alternative
        return False, False


def import_failure(target: Target, fact: ImportFact) -> str | None:
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
