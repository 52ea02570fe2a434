"""Attributes of vLLM's modules and classes that are read and not there (BP103), and paths in strings (BP104, BP302)."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.conditions import Ref
from vllm_patchbay.audit.facts import ImportFact, PatchFact, PathFact, UseFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.upstream.symbols import Outcome, Resolution

VARIABLES = "vllm.envs"


def check(context: Context) -> Iterator[Finding]:
    created = _created(context)
    imported = {fact.module for fact in context.facts if isinstance(fact, ImportFact) and not fact.name}
    for number, fact, standing in context.each(UseFact):
        if standing.for_types or context.judge.failure(number) != "AttributeError":
            continue
        live = context.judge.live(fact.meanings)
        ref, found = _first_missing(context, live[0].ref)
        if ref.path in imported or any(module.startswith(f"{ref.path}.") for module in imported):
            # The import of the module is reported already.
            continue
        if ref.path in context.plugin.modules_provided or context.target.depends_on_build(ref.path):
            continue
        owner, _, name = ref.path.rpartition(".")
        above, _, owner_name = owner.rpartition(".")
        if created.get((owner, name), number) < number or created.get((above, owner_name), number) < number:
            # The plugin set the attribute before, or put something of its own in the place of its owner.
            continue
        if name in context.plugin.names_registered:
            continue
        if owner == VARIABLES and name in context.plugin.variables_declared:
            continue
        swallowed, has_alternative = context.judge.swallowed(fact.place, "AttributeError")
        if swallowed and has_alternative:
            continue
        rule = "BP601" if found.module == VARIABLES and name.startswith("VLLM_") else "BP103"
        message = found.reason
        if rule == "BP601":
            message = f"vllm.envs does not know {name}"
        yield context.finding(
            rule,
            fact.place,
            message + ("; the failure is caught" if swallowed else ""),
            severity=Severity.NOTE if swallowed else Severity.ERROR,
            standing=standing,
            remedy=context.similar(found, name) or context.home_of(name),
        )
    yield from _paths(context)


def _created(context: Context) -> dict[tuple[str, str], int]:
    """What the plugin itself sets on vLLM's objects, by owner and attribute: the number of the first such fact in this
    file, -1 if another file sets it."""
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
    """The shortest part of the name that leads nowhere."""
    for count in range(1, len(ref.rest) + 1):
        part = Ref(ref.base, ref.rest[:count])
        found = context.target.find(part)
        if found.is_missing:
            return part, found
    return ref, context.target.find(ref)


def _paths(context: Context) -> Iterator[Finding]:
    for _, fact, standing in context.each(PathFact):
        root = fact.path.partition(".")[0].partition(":")[0]
        index = context.target.index
        found = index.resolve(fact.module, fact.name) if fact.module else index.resolve_path(fact.name)
        if found.outcome is not Outcome.MISSING or standing.for_types:
            continue
        if root == "vllm":
            module = fact.module or fact.name.rpartition(".")[0]
            if context.target.depends_on_build(module) or module in context.plugin.modules_provided:
                continue
            name = fact.name.rpartition(".")[2]
            yield context.finding(
                "BP104", fact.place, f"{fact.path!r}: {found.reason}", standing=standing, remedy=context.home_of(name)
            )
        else:
            yield context.finding("BP302", fact.place, f"{fact.path!r}: {found.reason}", standing=standing)
