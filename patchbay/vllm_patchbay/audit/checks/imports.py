"""Checks imports: modules (BP101) and names (BP102) that this vLLM does not have.

It also reports what the reader of the files left unresolved (BP901), and modules that the plugin puts into sys.modules
without effect (BP201).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.facts import ImportFact, ModuleFact, UnresolvedFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.vllm_target import Reachability


def check(context: Context) -> Iterator[Finding]:
    for number, fact, reachability in context.each(ImportFact):
        failure = context.evaluator.failure(number)
        if failure is None:
            if not reachability.type_checking_only:
                yield _unresolved(context, fact)
        elif failure:
            yield from _missing(context, fact, reachability, failure)
    for _, doubt, _ in context.each(UnresolvedFact):
        yield context.finding("BP901", doubt.place, doubt.what)
    for _, module, reachability in context.each(ModuleFact):
        target = context.target
        if not target.tree.has(module.module) and not target.depends_on_build(module.module):
            yield context.finding(
                "BP201",
                module.place,
                f"the plugin puts {module.module} into sys.modules, but vLLM neither has nor imports that module",
                severity=Severity.WARNING,
                reachability=reachability,
                remedy="use the current name of the module, or remove the line",
            )


def _missing(context: Context, fact: ImportFact, reachability: Reachability, failure: str) -> Iterator[Finding]:
    is_caught, has_alternative = context.evaluator.caught_at(fact.place, failure)
    if is_caught and has_alternative:
        return
    if failure == "ModuleNotFoundError":
        rule, message = "BP101", f"there is no module {fact.module}"
        remedy = _module_hint(context, fact)
    else:
        found = context.target.index.resolve(fact.module, fact.name)
        if reachability.type_checking_only and context.target.is_bound_for_type_checkers(found):
            return
        rule, message = "BP102", found.reason or f"{fact.module} has no {fact.name}"
        remedy = context.home_of(fact.name) or context.similar(found, fact.name)
    severity = None
    if is_caught:
        severity = Severity.NOTE
        message += "; the exception is caught, and the plugin runs without the import"
    yield context.finding(rule, fact.place, message, severity=severity, reachability=reachability, remedy=remedy)


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
            return context.finding("BP901", fact.place, f"whether {path} exists depends on how vLLM was built")
        return context.finding("BP901", fact.place, f"{path}: {found.reason}")
    return context.finding("BP901", fact.place, f"{fact.module} cannot be read, so {fact.name} is not checked")
