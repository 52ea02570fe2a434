"""Checks reads of attributes that vLLM's modules and classes do not have (BP103, for variables of vllm.envs BP601).

It also checks strings that are paths of classes or functions (BP104, BP302).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.conditions import Ref
from vllm_patchbay.audit.facts import ImportFact, PatchFact, PathFact, UseFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.upstream.symbols import Outcome, Resolution

ENVS_MODULE = "vllm.envs"


def check(context: Context) -> Iterator[Finding]:
    created = _created(context)
    imported = {fact.module for fact in context.facts if isinstance(fact, ImportFact) and not fact.name}
    for number, fact, reachability in context.each(UseFact):
        if reachability.type_checking_only or context.evaluator.failure(number) != "AttributeError":
            continue
        live = context.evaluator.live_meanings(fact.meanings)
        ref, found = _first_missing(context, live[0].ref)
        if ref.path in imported or any(module.startswith(f"{ref.path}.") for module in imported):
            # The import check reports the missing module.
            continue
        if ref.path in context.plugin.modules_provided or context.target.depends_on_build(ref.path):
            continue
        owner, _, name = ref.path.rpartition(".")
        above, _, owner_name = owner.rpartition(".")
        if created.get((owner, name), number) < number or created.get((above, owner_name), number) < number:
            # The plugin set the attribute before, or replaced its owner.
            continue
        if name in context.plugin.names_registered:
            continue
        if owner == ENVS_MODULE and name in context.plugin.variables_declared:
            continue
        is_caught, has_alternative = context.evaluator.caught_at(fact.place, "AttributeError")
        if is_caught and has_alternative:
            continue
        rule = "BP601" if found.module == ENVS_MODULE and name.startswith("VLLM_") else "BP103"
        message = found.reason
        if rule == "BP601":
            message = f"vllm.envs does not define {name}"
        yield context.finding(
            rule,
            fact.place,
            message + ("; the exception is caught" if is_caught else ""),
            severity=Severity.NOTE if is_caught else Severity.ERROR,
            reachability=reachability,
            remedy=context.similar(found, name) or context.home_of(name),
        )
    yield from _paths(context)


def _created(context: Context) -> dict[tuple[str, str], int]:
    """Returns the attributes that the plugin sets on objects of vLLM, by owner and name.

    The value is the number of the first such fact in this file, or -1 if another file sets the attribute.
    """
    created: dict[tuple[str, str], int] = {}
    for number, fact in enumerate(context.facts):
        if isinstance(fact, PatchFact):
            for meaning in fact.owners:
                created.setdefault((meaning.ref.path, fact.attribute), number)
    for file, facts in context.plugin.facts.items():
        if file != context.file:
            for fact in facts:
                if isinstance(fact, PatchFact):
                    for meaning in fact.owners:
                        created.setdefault((meaning.ref.path, fact.attribute), -1)
    return created


def _first_missing(context: Context, ref: Ref) -> tuple[Ref, Resolution]:
    """Returns the shortest part of a dotted name that does not exist, and its resolution."""
    for count in range(1, len(ref.rest) + 1):
        part = Ref(ref.base, ref.rest[:count])
        found = context.target.find(part)
        if found.is_missing:
            return part, found
    return ref, context.target.find(ref)


def _paths(context: Context) -> Iterator[Finding]:
    for _, fact, reachability in context.each(PathFact):
        root = fact.path.partition(".")[0].partition(":")[0]
        index = context.target.index
        found = index.resolve(fact.module, fact.name) if fact.module else index.resolve_path(fact.name)
        if found.outcome is not Outcome.MISSING or reachability.type_checking_only:
            continue
        if root == "vllm":
            module = fact.module or fact.name.rpartition(".")[0]
            if context.target.depends_on_build(module) or module in context.plugin.modules_provided:
                continue
            name = fact.name.rpartition(".")[2]
            yield context.finding(
                "BP104",
                fact.place,
                f"{fact.path!r}: {found.reason}",
                reachability=reachability,
                remedy=context.home_of(name),
            )
        else:
            yield context.finding("BP302", fact.place, f"{fact.path!r}: {found.reason}", reachability=reachability)
