"""Checks assignments onto vLLM's modules and classes: attributes that do not exist (BP201).

It also records the replaced definitions, whose source is compared between two vLLMs (BP202).
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_patchbay.audit.checks.attribute_reads import is_read
from vllm_patchbay.audit.checks.context import Context, UpstreamDefinition
from vllm_patchbay.audit.checks.uses import ENVS_MODULE
from vllm_patchbay.audit.conditions import Exists, Not
from vllm_patchbay.audit.facts import KernelFact, PatchFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.vllm_target import Reachability
from vllm_patchbay.upstream.modules import Binds
from vllm_patchbay.upstream.source import SourceError
from vllm_patchbay.upstream.symbols import Outcome, Resolution


def check(context: Context) -> Iterator[Finding]:
    for number, fact, reachability in context.each(PatchFact):
        if reachability.type_checking_only:
            continue
        live = context.evaluator.live_meanings(fact.owners)
        owners = [context.target.find(meaning.ref) for meaning in live]
        owners = [
            owner for owner in owners if owner.is_found and (owner.is_module or owner.is_class) and _is_in_vllm(owner)
        ]
        if not owners:
            for ref, reason in context.evaluator.unknown_meanings(fact.owners):
                what = f"it is unknown whether {ref.path} has {fact.attribute}: {reason}"
                yield context.finding("BP901", fact.place, what)
            continue
        found = [(owner, context.target.index.member(owner, fact.attribute)) for owner in owners]
        present = [member for _, member in found if member.is_found]
        if present:
            record_replaced(context, number, present[0])
            yield from _hidden_by_instances(context, fact, present[0], reachability)
        elif any(member.outcome is Outcome.UNKNOWN for _, member in found):
            if not fact.attribute.startswith("__"):
                yield context.finding("BP901", fact.place, _unknown_member(found, fact.attribute))
        elif found and not fact.may_create:
            owner, member = found[0]
            if owner.module == ENVS_MODULE and fact.attribute.startswith("VLLM_"):
                message = f"vllm.envs does not define {fact.attribute}"
                yield context.finding("BP601", fact.place, message, reachability=reachability)
                continue
            message = f"{owner.path} has no {fact.attribute}; the assignment creates it, and nothing in vLLM reads it"
            severity = None
            is_its_own = _is_shim(fact) or is_read(context, number, owner, fact.attribute)
            if is_its_own:
                severity = Severity.NOTE
                message = f"{owner.path} has no {fact.attribute}; the assignment creates it for the plugin's own use"
            elif is_its_own is None:
                severity = Severity.WARNING
                message += f", unless an object of unknown type that the plugin reads {fact.attribute} from is one"
            remedy = context.similar(member, fact.attribute)
            yield context.finding(
                "BP201", fact.place, message, severity=severity, reachability=reachability, remedy=remedy
            )


def _is_in_vllm(owner: Resolution) -> bool:
    return owner.module.partition(".")[0] == "vllm"


def _is_shim(fact: PatchFact) -> bool:
    """Returns whether the plugin sets the attribute only if vLLM does not have it."""
    return any(
        isinstance(condition, Not)
        and isinstance(condition.condition, Exists)
        and condition.condition.ref.path.rpartition(".")[2] == fact.attribute
        for condition in fact.place.reach
    )


def _hidden_by_instances(
    context: Context, fact: PatchFact, found: Resolution, reachability: Reachability
) -> Iterator[Finding]:
    """Reports a class attribute that every instance hides, because its constructor sets the attribute too."""
    if context.target.index.kinds_of(found) != {Binds.INSTANCE} or fact.may_create:
        return
    symbol = found.symbol
    if symbol is None or symbol.conditional:
        return
    owner = f"{found.module}:{found.qualname.rpartition('.')[0]}"
    message = f"{owner} sets {fact.attribute} on each instance in its constructor, which hides the class attribute"
    if fact.is_plain:
        yield context.finding("BP201", fact.place, message, reachability=reachability)
    else:
        yield context.finding("BP901", fact.place, f"{message} unless the assigned value is a descriptor")


def _unknown_member(found: list[tuple[Resolution, Resolution]], attribute: str) -> str:
    owner, member = next((o, m) for o, m in found if m.outcome is Outcome.UNKNOWN)
    return f"it is unknown whether {owner.path} has {attribute}: {member.reason}"


def record_replaced(context: Context, number: int, found: Resolution) -> None:
    """Records the upstream definition that the fact of a number replaces, for comparison with another vLLM."""
    if not context.compares_versions or found.symbol is None:
        return
    fact = context.facts[number]
    assert isinstance(fact, (PatchFact, KernelFact))
    try:
        fingerprint = context.target.index.fingerprint_of(found.module, found.qualname)
    except (SourceError, SyntaxError, RecursionError):
        return
    context.targets_found[context.file, number] = UpstreamDefinition(found.path, fingerprint, found.symbol.signature)
