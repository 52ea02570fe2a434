"""Checks VLLM_* environment variables that this vLLM does not define (BP601)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.facts import VariableFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity


def check(context: Context) -> Iterator[Finding]:
    known = context.target.survey.variables
    if not known:
        return
    for _, fact, reachability in context.each(VariableFact):
        if fact.name in known or fact.name in context.plugin.variables_declared:
            continue
        if context.target.survey.unreadable:
            what = f"it is unknown whether this vLLM defines {fact.name}: some of its files cannot be read"
            yield context.finding("BP901", fact.place, what)
            continue
        close = difflib.get_close_matches(fact.name, known, n=1, cutoff=0.85)
        remedy = f"did you mean {close[0]}?" if close else ""
        if fact.name in context.plugin.variables_read:
            message = f"{fact.name} is the plugin's own variable; this vLLM does not define it and warns if it is set"
            severity = Severity.NOTE
        else:
            message = f"this vLLM does not define {fact.name}, so setting it has no effect"
            severity = Severity.WARNING
        yield context.finding("BP601", fact.place, message, severity=severity, reachability=reachability, remedy=remedy)
