"""Checks entry points: objects that do not exist, and plugin groups that vLLM does not load (BP501)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from vllm_patchbay.audit.entry_points import EntryPoint
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import RULES, Severity
from vllm_patchbay.audit.vllm_target import VllmTarget
from vllm_patchbay.upstream.symbols import Outcome


def check(target: VllmTarget, entry_points: Sequence[EntryPoint]) -> Iterator[Finding]:
    for entry in entry_points:
        known = target.survey.groups
        if entry.group.startswith("vllm.") and known and entry.group not in known:
            close = difflib.get_close_matches(entry.group, known, n=1, cutoff=0.5)
            remedy = f"did you mean {close[0]}?" if close else ""
            yield _finding(target, entry, f"vLLM does not load the entry-point group {entry.group}", remedy=remedy)
        yield from _object(target, entry)


def _object(target: VllmTarget, entry: EntryPoint) -> Iterator[Finding]:
    value = entry.value.partition("[")[0].strip()
    module, _, name = (part.strip() for part in value.partition(":"))
    if module.partition(".")[0] not in target.plugin.packages:
        if entry.group.startswith("vllm."):
            what = f"{entry.name} = {entry.value}: {module} is not among the audited files"
            yield _finding(target, entry, what, rule="BP901")
        return
    found = target.index.resolve(module, name)
    if found.is_missing:
        yield _finding(target, entry, f"{entry.name} = {entry.value} does not exist: {found.reason}")
    elif found.outcome is Outcome.UNKNOWN:
        yield _finding(target, entry, f"{entry.name} = {entry.value}: {found.reason}", rule="BP901")


def _finding(target: VllmTarget, entry: EntryPoint, message: str, *, rule: str = "BP501", remedy: str = "") -> Finding:
    declared = RULES[rule]
    severity = declared.severity if rule != "BP901" else Severity.NOTE
    return Finding(rule, severity, entry.file, entry.line, 1, message, target.label, remedy or declared.remedy)
