"""Decides overrides that only some calls do not suit, by looking at how vLLM calls methods of that name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_backplane.audit.findings import Finding
from vllm_backplane.audit.rules import Severity
from vllm_backplane.upstream.callers import Calls, calls_of
from vllm_backplane.upstream.signatures import Fault, Mismatch
from vllm_backplane.upstream.source import SourceTree

Doubtful = tuple[Finding, str, tuple[Mismatch, ...]]


def decide(tree: SourceTree, doubtful: list[Doubtful]) -> Iterator[Finding]:
    calls = calls_of(tree, (method for _, method, _ in doubtful))
    for finding, method, problems in doubtful:
        shown = [problem.what for problem in problems if _is_seen(problem, calls[method])]
        if shown:
            message = f"{finding.message}; vLLM makes such calls"
            finding = replace(finding, severity=Severity.WARNING, message=message)
        yield finding


def _is_seen(problem: Mismatch, calls: Calls) -> bool:
    if problem.fault is Fault.BY_NAME:
        return problem.parameter in calls.keywords
    if problem.fault is Fault.BY_POSITION:
        return 0 <= problem.index < calls.positional
    return False
