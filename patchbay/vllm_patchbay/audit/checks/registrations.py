"""Checks replacements that are registered by name and match nothing in vLLM (BP301)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from vllm_patchbay.audit.checks.assignments import record_replaced
from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.facts import KernelFact, RegisterFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.vllm_target import Reachability

REPLACEABLE = frozenset({"CustomOp", "PluggableLayer"})
"""Base classes that look up a replacement when a subclass is instantiated."""


def check(context: Context) -> Iterator[Finding]:
    for _, fact, reachability in context.each(RegisterFact):
        yield from _replacement(context, fact, reachability)
    for number, kernel, reachability in context.each(KernelFact):
        found = context.target.index.resolve_path(kernel.path)
        if found.is_missing:
            remedy = context.home_of(kernel.path.rpartition(".")[2])
            message = f"{kernel.path}: {found.reason}; the kernel replaces nothing"
            yield context.finding("BP301", kernel.place, message, reachability=reachability, remedy=remedy)
        elif found.is_found:
            record_replaced(context, number, found)


def _replacement(context: Context, fact: RegisterFact, reachability: Reachability) -> Iterator[Finding]:
    live = context.evaluator.live_meanings(fact.owners)
    owners = [context.target.find(meaning.ref) for meaning in live]
    if not owners or not owners[0].is_found:
        return
    owner = owners[0]
    if not fact.name:
        if owner.is_class and owner.module.startswith("vllm.") and owner.qualname in REPLACEABLE:
            message = f"without a name, this registers a replacement for {owner.qualname} itself, which is not a layer"
            yield context.finding("BP301", fact.place, message, reachability=reachability)
        elif owner.is_class and owner.module.startswith("vllm."):
            yield from _without_lookup(context, fact, reachability, owner.qualname, ((owner.module, owner.qualname),))
        return
    modules = context.target.survey.classes.get(fact.name, ())
    if not modules:
        if fact.name in context.plugin.classes:
            return
        if context.target.survey.unreadable:
            what = f"it is unknown whether vLLM has a class {fact.name}: some of its files cannot be read"
            yield context.finding("BP901", fact.place, what)
            return
        close = difflib.get_close_matches(fact.name, context.target.survey.classes, n=1, cutoff=0.8)
        message = f"vLLM has no class {fact.name}, so nothing is replaced"
        remedy = f"did you mean {close[0]}?" if close else ""
        yield context.finding("BP301", fact.place, message, reachability=reachability, remedy=remedy)
    else:
        yield from _without_lookup(
            context, fact, reachability, fact.name, tuple((module, fact.name) for module in modules)
        )


def _without_lookup(
    context: Context, fact: RegisterFact, reachability: Reachability, name: str, candidates: tuple[tuple[str, str], ...]
) -> Iterator[Finding]:
    """Reports a registration if no class of that name looks up replacements when it is instantiated."""
    for module, qualname in candidates:
        ancestors = context.target.index.ancestors(module, qualname)
        if ancestors is None or any(ancestor in REPLACEABLE for _, ancestor, _ in ancestors.classes):
            return
        if any(not base.startswith(("torch.", "abc.", "builtins.")) for base in ancestors.unknown_bases):
            return
    message = f"{name} is not a {' or '.join(sorted(REPLACEABLE))} in this vLLM, so it never looks up a replacement"
    yield context.finding("BP301", fact.place, message, severity=Severity.WARNING, reachability=reachability)
