"""Defines what a check receives: the facts of a file, the vLLM to check them against, and helpers for findings."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_patchbay.audit.facts import Fact, Place
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.plugin import Plugin
from vllm_patchbay.audit.rules import RULES, Severity
from vllm_patchbay.audit.vllm_target import ConditionEvaluator, Reachability, VllmTarget
from vllm_patchbay.upstream.signatures import Mismatch, Signature
from vllm_patchbay.upstream.symbols import Resolution

F = TypeVar("F")


@dataclass(slots=True)
class UpstreamDefinition:
    """Describes the upstream definition that a fact concerns in one vLLM, for comparison with another vLLM."""

    path: str
    fingerprint: str = ""
    signature: Signature | None = None


@dataclass(slots=True)
class Context:
    """Holds the input of the checks for one file and one vLLM, and the tables in which they record definitions."""

    file: str
    facts: list[Fact]
    target: VllmTarget
    evaluator: ConditionEvaluator
    compares_versions: bool
    """Whether several vLLMs are audited, so that fingerprints of upstream sources are needed."""
    targets_found: dict[tuple[str, int], UpstreamDefinition] = field(default_factory=dict)
    """Definitions that the plugin replaces, by file and number of the fact."""
    members_found: dict[tuple[str, int, str], UpstreamDefinition] = field(default_factory=dict)
    """Inherited members that the plugin overrides or reads, by file, number of the class fact and name."""
    members_missing: set[tuple[str, int, str]] = field(default_factory=set)
    """Members that the plugin overrides or reads and that no base class has, by the same key."""

    undecided: list[tuple[Finding, str, tuple[Mismatch, ...]]] = field(default_factory=list)
    """Overrides that fail only for calls of a certain form. vLLM's source is searched for such calls once, for all of
    them."""

    @property
    def plugin(self) -> Plugin:
        """Returns the audited plugin."""
        return self.target.plugin

    def each(self, kind: type[F]) -> Iterator[tuple[int, F, Reachability]]:
        """Yields the facts of a kind whose line runs with this vLLM, with their numbers."""
        for number, fact in enumerate(self.facts):
            if isinstance(fact, kind):
                reachability = self.evaluator.reachability(fact.place)
                if reachability.runs:
                    yield number, fact, reachability

    def finding(
        self,
        rule_id: str,
        place: Place,
        message: str,
        *,
        severity: Severity | None = None,
        reachability: Reachability | None = None,
        remedy: str = "",
    ) -> Finding:
        """Returns a finding, with the rule's severity and remedy by default.

        It is a note if `reachability` is given and shows a guard or ``TYPE_CHECKING``.
        """
        rule = RULES[rule_id]
        level = rule.severity if severity is None else severity
        if reachability is not None and (reachability.guarded or reachability.type_checking_only):
            level = Severity.NOTE
            message += (
                " (for type checkers only)"
                if reachability.type_checking_only
                else " (behind a guard that was not understood)"
            )
        return Finding(
            rule_id, level, self.file, place.line, place.column, message, self.target.label, remedy or rule.remedy
        )

    def home_of(self, name: str) -> str:
        """Returns a hint at the modules that define a class or function of this name, or an empty string."""
        modules = self.target.survey.definitions.get(name, ())
        if not modules or len(modules) > 3:
            return ""
        return f"{name} is now in {' or '.join(modules)}"

    def similar(self, found: Resolution, name: str) -> str:
        """Returns a hint at a similar name of the same owner, or an empty string."""
        names: set[str] = set()
        owner, _, _ = found.qualname.rpartition(".")
        if owner:
            ancestors = self.target.index.ancestors(found.module, owner)
            names = {member for _, _, body in (ancestors.classes if ancestors else ()) for member in body.members}
        else:
            content = self.target.index.module(found.module)
            names = set(content.names) | set(content.lazy_names or ()) if content is not None else set()
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        return f"did you mean {close[0]}?" if close else ""
