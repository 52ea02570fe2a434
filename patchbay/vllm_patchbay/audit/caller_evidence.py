"""Decides overrides that only some calls do not suit, by looking at how vLLM calls methods of that name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.upstream.call_sites import Calls, calls_of, is_common
from vllm_patchbay.upstream.signatures import Fault, Mismatch
from vllm_patchbay.upstream.source import SourceTree
from vllm_patchbay.upstream.symbols import SymbolIndex

Doubtful = tuple[Finding, str, tuple[Mismatch, ...]]


def decide(index: SymbolIndex, tree: SourceTree, doubtful: list[Doubtful]) -> Iterator[Finding]:
    calls = calls_of(tree, (method for _, method, _ in doubtful))
    seen = {method for _, method, problems in doubtful if any(_is_seen(problem, calls[method]) for problem in problems)}
    # A call of 'forward' may be of any of hundreds of classes.
    common = {method for method in seen if is_common(index, tree, method)}
    for finding, method, problems in doubtful:
        shown = any(_is_seen(problem, calls[method]) for problem in problems)
        if shown and method not in common:
            message = f"{finding.message}; vLLM makes such calls"
            finding = replace(finding, severity=Severity.WARNING, message=message)
        yield finding


def _is_seen(problem: Mismatch, calls: Calls) -> bool:
    if problem.fault is Fault.BY_NAME:
        return problem.parameter in calls.keywords
    if problem.fault is Fault.BY_POSITION:
        return 0 <= problem.index < calls.positional
    return False
