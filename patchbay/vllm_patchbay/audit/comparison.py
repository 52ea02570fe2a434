"""Compares the results for two vLLMs: replaced code that changed (BP202) and inherited members that were removed
(BP402, BP404)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vllm_patchbay.audit.checks.context import UpstreamDefinition
from vllm_patchbay.audit.facts import ClassFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.plugin import Plugin
from vllm_patchbay.audit.rules import RULES, Severity
from vllm_patchbay.audit.vllm_target import VllmTarget
from vllm_patchbay.upstream.source import SourceError, SourceTree
from vllm_patchbay.upstream.symbols import SymbolIndex


@dataclass(slots=True)
class TargetResult:
    """Holds the findings of the checks with one vLLM, and the upstream definitions that they recorded for comparison.

    `Context` describes the definitions.
    """

    label: str
    """Version of the vLLM, or the name of a tree without one."""
    findings: list[Finding] = field(default_factory=list)
    targets_found: dict[tuple[str, int], UpstreamDefinition] = field(default_factory=dict)
    members_found: dict[tuple[str, int, str], UpstreamDefinition] = field(default_factory=dict)
    members_missing: set[tuple[str, int, str]] = field(default_factory=set)


def compare(plugin: Plugin, older: TargetResult, newer: TargetResult) -> Iterator[Finding]:
    """Yields findings about `newer` that the difference from `older` shows."""
    for (file, number), now in newer.targets_found.items():
        before = older.targets_found.get((file, number))
        if before is not None and before.fingerprint != now.fingerprint:
            place = plugin.facts[file][number].place
            message = f"{now.path} changed between {older.label} and {newer.label}"
            if before.path != now.path:
                message += f" (it was {before.path})"
            if before.signature != now.signature and before.signature and now.signature:
                message += f"; its signature was {before.signature} and is {now.signature}"
            yield _finding("BP202", file, place.line, place.column, message, newer.label)
    for file, number, name in sorted(newer.members_missing):
        before = older.members_found.get((file, number, name))
        if before is not None:
            fact = plugin.facts[file][number]
            assert isinstance(fact, ClassFact)
            yield from _removed_members(plugin, fact, file, name, before, older.label, newer.label)


def _removed_members(
    plugin: Plugin, fact: ClassFact, file: str, name: str, before: UpstreamDefinition, older: str, newer: str
) -> Iterator[Finding]:
    for method in fact.methods:
        if method.symbol.name == name:
            message = f"{fact.name}.{name} overrides {before.path}, which {older} has and {newer} does not"
            severity = Severity.NOTE if name in plugin.attributes_read else None
            yield _finding("BP402", file, method.line, method.column, message, newer, severity)
            return
    for use in fact.self_reads:
        if use.name == name and name not in plugin.attributes_set:
            message = f"{fact.name} reads self.{name} ({before.path}), which {older} has and {newer} does not"
            yield _finding("BP404", file, use.place.line, use.place.column, message, newer)


def with_signature_changes(findings: list[Finding], older: TargetResult, newer: TargetResult) -> list[Finding]:
    """Adds the older upstream signature to findings about overrides whose upstream signature changed.

    Such a finding is at least a warning, because the override was probably written for the older signature.
    """
    changed = {
        path: before.signature
        for key, now in newer.members_found.items()
        if (before := older.members_found.get(key)) is not None
        and before.signature != now.signature
        and before.signature is not None
        for path in [now.path]
    }
    return [
        replace(
            finding,
            message=f"{finding.message}; in {older.label} it was {changed[path]}",
            severity=max(finding.severity, Severity.WARNING),
        )
        if finding.rule_id == "BP401" and (path := _upstream_path_in(finding.message)) in changed
        else finding
        for finding in findings
    ]


def _upstream_path_in(message: str) -> str:
    """Returns the upstream path in a message of `checks.overrides`."""
    return message.partition(" does not fit ")[2].partition(": ")[0]


def upstream_diff(older: SourceTree, newer: SourceTree, before: UpstreamDefinition, now: UpstreamDefinition) -> str:
    """Returns the unified diff of one definition's source between two trees."""
    sides = []
    for tree, upstream in ((older, before), (newer, now)):
        module, _, qualname = upstream.path.partition(":")
        try:
            sides.append(SymbolIndex(tree).source_of(module, qualname).splitlines())
        except SourceError as fault:
            return str(fault)
    names = f"{older.version}/{before.path}", f"{newer.version}/{now.path}"
    return "\n".join(difflib.unified_diff(sides[0], sides[1], *names, n=2, lineterm=""))


def sorted_by_version(targets: list[VllmTarget]) -> list[VllmTarget]:
    """Returns the targets, oldest first. A tree without a version counts as the newest."""
    return sorted(targets, key=lambda target: (target.version is None, target.version))


def _finding(
    rule_id: str, file: str, line: int, column: int, message: str, vllm: str, severity: Severity | None = None
) -> Finding:
    rule = RULES[rule_id]
    return Finding(
        rule_id, rule.severity if severity is None else severity, file, line, column, message, vllm, rule.remedy
    )
