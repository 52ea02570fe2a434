"""Raises the severity of an override finding if vLLM's source has a call that the override does not accept.

Some mismatched signatures fail only for calls of a certain form, such as one that passes an argument by name. Such a
finding is a note until vLLM is seen to call a method of that name in that form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.upstream.call_sites import Calls, calls_of, is_common_method_name
from vllm_patchbay.upstream.signatures import Fault, Mismatch
from vllm_patchbay.upstream.source import SourceTree
from vllm_patchbay.upstream.symbols import SymbolIndex

UndecidedOverride = tuple[Finding, str, tuple[Mismatch, ...]]
"""A finding that is a note so far, the name of the method, and how its signature differs from upstream's."""


def with_caller_evidence(index: SymbolIndex, tree: SourceTree, undecided: list[UndecidedOverride]) -> Iterator[Finding]:
    """Yields the findings; those that a call in vLLM's source confirms become warnings."""
    calls = calls_of(tree, (method for _, method, _ in undecided))
    confirmed = {
        method for _, method, problems in undecided if any(_fails(problem, calls[method]) for problem in problems)
    }
    # A call of 'forward' may be of any of hundreds of classes, so it is no evidence for one of them.
    common = {method for method in confirmed if is_common_method_name(index, tree, method)}
    for finding, method, problems in undecided:
        if method not in common and any(_fails(problem, calls[method]) for problem in problems):
            message = f"{finding.message}; vLLM makes such calls"
            finding = replace(finding, severity=Severity.WARNING, message=message)
        yield finding


def _fails(problem: Mismatch, calls: Calls) -> bool:
    """Returns whether one of the calls has the form that the override does not accept."""
    if problem.fault is Fault.BY_NAME:
        return problem.parameter in calls.keywords
    if problem.fault is Fault.BY_POSITION:
        return 0 <= problem.index < calls.positional
    return False
