"""Registrations by name that match nothing upstream (BP301)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from vllm_patchbay.audit.checks.assignments import remember
from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.facts import KernelFact, RegisterFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.vllm_target import Standing

_ROOTS = frozenset({"CustomOp", "PluggableLayer"})
"""Classes whose instantiation looks replacements up."""


def check(context: Context) -> Iterator[Finding]:
    for _, fact, standing in context.each(RegisterFact):
        yield from _replacement(context, fact, standing)
    for number, kernel, standing in context.each(KernelFact):
        found = context.target.index.resolve_path(kernel.path)
        if found.is_missing:
            remedy = context.home_of(kernel.path.rpartition(".")[2])
            message = f"{kernel.path}: {found.reason}; the kernel replaces nothing"
            yield context.finding("BP301", kernel.place, message, standing=standing, remedy=remedy)
        elif found.is_found:
            remember(context, number, found)


def _replacement(context: Context, fact: RegisterFact, standing: Standing) -> Iterator[Finding]:
    live = context.judge.live(fact.owners)
    owners = [context.target.find(meaning.ref) for meaning in live]
    if not owners or not owners[0].is_found:
        return
    owner = owners[0]
    if not fact.name:
        if owner.is_class and owner.module.startswith("vllm.") and owner.qualname in _ROOTS:
            message = f"without a name, the replacement is registered for {owner.qualname} itself, which is no layer"
            yield context.finding("BP301", fact.place, message, standing=standing)
        elif owner.is_class and owner.module.startswith("vllm."):
            yield from _asks(context, fact, standing, owner.qualname, ((owner.module, owner.qualname),))
        return
    modules = context.target.survey.classes.get(fact.name, ())
    if not modules:
        if fact.name in context.plugin.classes:
            return
        if context.target.survey.unreadable:
            what = f"whether a class of vLLM is called {fact.name} is not known: some of its files cannot be read"
            yield context.finding("BP901", fact.place, what)
            return
        close = difflib.get_close_matches(fact.name, context.target.survey.classes, n=1, cutoff=0.8)
        message = f"no class of vLLM is called {fact.name}, so nothing is replaced"
        remedy = f"did you mean {close[0]}?" if close else ""
        yield context.finding("BP301", fact.place, message, standing=standing, remedy=remedy)
    else:
        yield from _asks(context, fact, standing, fact.name, tuple((module, fact.name) for module in modules))


def _asks(
    context: Context, fact: RegisterFact, standing: Standing, name: str, candidates: tuple[tuple[str, str], ...]
) -> Iterator[Finding]:
    """One of the classes of that name must look up replacements when it is instantiated."""
    for module, qualname in candidates:
        line = context.target.index.ancestors(module, qualname)
        if line is None or any(ancestor in _ROOTS for _, ancestor, _ in line.classes):
            return
        if any(not base.startswith(("torch.", "abc.", "builtins.")) for base in line.outside):
            return
    message = f"{name} is not a {' or '.join(sorted(_ROOTS))} in this vLLM, so it never asks for a replacement"
    yield context.finding("BP301", fact.place, message, severity=Severity.WARNING, standing=standing)
