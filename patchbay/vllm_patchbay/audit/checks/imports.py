"""Imports of modules and names that are gone (BP101, BP102)."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.facts import ImportFact, ModuleFact, UnresolvedFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.vllm_target import Standing


def check(context: Context) -> Iterator[Finding]:
    for number, fact, standing in context.each(ImportFact):
        failure = context.judge.failure(number)
        if failure is None:
            if not standing.for_types:
                yield _unresolved(context, fact)
        elif failure:
            yield from _missing(context, fact, standing, failure)
    for _, doubt, _ in context.each(UnresolvedFact):
        yield context.finding("BP901", doubt.place, doubt.what)
    for _, module, standing in context.each(ModuleFact):
        target = context.target
        if not target.tree.has(module.module) and not target.depends_on_build(module.module):
            yield context.finding(
                "BP201",
                module.place,
                f"sys.modules gets {module.module}, which vLLM does not have and does not import",
                severity=Severity.WARNING,
                standing=standing,
                remedy="put the module under the name it has now, or remove the line",
            )


def _missing(context: Context, fact: ImportFact, standing: Standing, failure: str) -> Iterator[Finding]:
    swallowed, has_alternative = context.judge.swallowed(fact.place, failure)
    if swallowed and has_alternative:
        return
    if failure == "ModuleNotFoundError":
        rule, message = "BP101", f"there is no module {fact.module}"
        remedy = _module_hint(context, fact)
    else:
        found = context.target.index.resolve(fact.module, fact.name)
        if standing.for_types and context.target.is_for_types(found):
            return
        rule, message = "BP102", found.reason or f"{fact.module} has no {fact.name}"
        remedy = context.home_of(fact.name) or context.similar(found, fact.name)
    severity = None
    if swallowed:
        severity = Severity.NOTE
        message += "; the failure is caught, and the plugin goes without"
    yield context.finding(rule, fact.place, message, severity=severity, standing=standing, remedy=remedy)


def _module_hint(context: Context, fact: ImportFact) -> str:
    hint = context.home_of(fact.name) if fact.name else ""
    if hint:
        return hint
    last = fact.module.rpartition(".")[2]
    same = [module for module in context.target.tree.module_names if module.rpartition(".")[2] == last]
    return f"there is {' and '.join(sorted(same))}" if 0 < len(same) <= 3 else ""


def _unresolved(context: Context, fact: ImportFact) -> Finding:
    if not context.target.tree.has(fact.module) or (fact.name and context.target.index.module(fact.module)):
        path = fact.module if not context.target.tree.has(fact.module) else f"{fact.module}.{fact.name}"
        found = context.target.index.resolve(fact.module, fact.name)
        if context.target.depends_on_build(path):
            return context.finding("BP901", fact.place, f"whether {path} is there depends on how vLLM was built")
        return context.finding("BP901", fact.place, f"{path}: {found.reason}")
    return context.finding("BP901", fact.place, f"{fact.module} cannot be looked into, so {fact.name} is not checked")
