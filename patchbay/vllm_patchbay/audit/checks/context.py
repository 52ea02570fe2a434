"""What a check has at hand: the facts of a file, the vLLM they are checked against, and how to report."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_patchbay.audit.facts import Fact, Place
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.plugin import Plugin
from vllm_patchbay.audit.rules import RULES, Severity
from vllm_patchbay.audit.vllm_target import Judge, Standing, Target
from vllm_patchbay.upstream.signatures import Mismatch, Signature
from vllm_patchbay.upstream.symbols import Resolution

F = TypeVar("F")


@dataclass(slots=True)
class Upstream:
    """What a fact leads to in one vLLM; compared between two."""

    path: str
    fingerprint: str = ""
    signature: Signature | None = None


@dataclass(slots=True)
class Context:
    file: str
    facts: list[Fact]
    target: Target
    judge: Judge
    compares: bool
    """There is another vLLM to compare with, so upstream sources are worth a fingerprint."""
    targets_found: dict[tuple[str, int], Upstream] = field(default_factory=dict)
    """By file and number of the fact: what it replaces."""
    members_found: dict[tuple[str, int, str], Upstream] = field(default_factory=dict)
    """By file, number of the class and name: the inherited member."""
    members_missing: set[tuple[str, int, str]] = field(default_factory=set)
    """Asked of the bases, whose members are all known, and not there."""

    doubtful: list[tuple[Finding, str, tuple[Mismatch, ...]]] = field(default_factory=list)
    """Overrides, by name, that only some calls do not suit: whether vLLM makes such calls is looked up for all at
    once."""

    @property
    def plugin(self) -> Plugin:
        return self.target.plugin

    def each(self, kind: type[F]) -> Iterator[tuple[int, F, Standing]]:
        """Facts of a kind whose line runs with this vLLM."""
        for number, fact in enumerate(self.facts):
            if isinstance(fact, kind):
                standing = self.judge.standing(fact.place)
                if standing.runs:
                    yield number, fact, standing

    def finding(
        self,
        rule_id: str,
        place: Place,
        message: str,
        *,
        severity: Severity | None = None,
        standing: Standing | None = None,
        remedy: str = "",
    ) -> Finding:
        rule = RULES[rule_id]
        level = rule.severity if severity is None else severity
        if standing is not None and (standing.guarded or standing.for_types):
            level = Severity.NOTE
            message += (
                " (for type checkers only)" if standing.for_types else " (behind a guard that was not understood)"
            )
        return Finding(
            rule_id, level, self.file, place.line, place.column, message, self.target.label, remedy or rule.remedy
        )

    def home_of(self, name: str, *, old_module: str = "") -> str:
        """A hint where a class or function of this name is now, or an empty string."""
        modules = self.target.survey.definitions.get(name, ())
        if not modules or len(modules) > 3:
            return ""
        return f"{name} is now in {' or '.join(modules)}"

    def similar(self, found: Resolution, name: str) -> str:
        """A hint at a name that is nearly the same, or an empty string."""
        names: set[str] = set()
        owner, _, _ = found.qualname.rpartition(".")
        if owner:
            line = self.target.index.ancestors(found.module, owner)
            names = {member for _, _, body in (line.classes if line else ()) for member in body.members}
        else:
            content = self.target.index.module(found.module)
            names = set(content.names) | set(content.lazy_names or ()) if content is not None else set()
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        return f"did you mean {close[0]}?" if close else ""
