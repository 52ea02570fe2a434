"""Assignments onto vLLM's modules and classes: attributes that are not there (BP201), and sources to compare
(BP202)."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_patchbay.audit.attribute_reads import is_read
from vllm_patchbay.audit.checks.context import Context, Upstream
from vllm_patchbay.audit.checks.uses import VARIABLES
from vllm_patchbay.audit.conditions import Exists, Not
from vllm_patchbay.audit.facts import KernelFact, PatchFact
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.vllm_target import Standing
from vllm_patchbay.upstream.modules import Binds
from vllm_patchbay.upstream.source import SourceError
from vllm_patchbay.upstream.symbols import Outcome, Resolution


def check(context: Context) -> Iterator[Finding]:
    for number, fact, standing in context.each(PatchFact):
        if standing.for_types:
            continue
        live = context.judge.live(fact.owners)
        owners = [context.target.find(meaning.ref) for meaning in live]
        owners = [
            owner for owner in owners if owner.is_found and (owner.is_module or owner.is_class) and _is_vllms(owner)
        ]
        if not owners:
            for ref, reason in context.judge.unknown(fact.owners):
                what = f"whether {ref.path} has {fact.attribute} is not known: {reason}"
                yield context.finding("BP901", fact.place, what)
            continue
        found = [(owner, context.target.index.member(owner, fact.attribute)) for owner in owners]
        present = [member for _, member in found if member.is_found]
        if present:
            remember(context, number, present[0])
            yield from _overwritten(context, fact, present[0], standing)
        elif any(member.outcome is Outcome.UNKNOWN for _, member in found):
            if not fact.attribute.startswith("__"):
                yield context.finding("BP901", fact.place, _doubt(found, fact.attribute))
        elif found and not fact.may_create:
            owner, member = found[0]
            if owner.module == VARIABLES and fact.attribute.startswith("VLLM_"):
                message = f"vllm.envs does not know {fact.attribute}"
                yield context.finding("BP601", fact.place, message, standing=standing)
                continue
            message = f"{owner.path} has no {fact.attribute}; the assignment creates it, and nothing in vLLM reads it"
            severity = None
            is_its_own = _is_shim(fact) or is_read(context, number, owner, fact.attribute)
            if is_its_own:
                severity = Severity.NOTE
                message = f"{owner.path} has no {fact.attribute}; the assignment creates it for the plugin's own use"
            elif is_its_own is None:
                severity = Severity.WARNING
                message += f", unless what the plugin reads {fact.attribute} from, which was not followed, is one"
            remedy = context.similar(member, fact.attribute)
            yield context.finding("BP201", fact.place, message, severity=severity, standing=standing, remedy=remedy)


def _is_vllms(owner: Resolution) -> bool:
    return owner.module.partition(".")[0] == "vllm"


def _is_shim(fact: PatchFact) -> bool:
    """Whether it is set only where it is not there."""
    return any(
        isinstance(condition, Not)
        and isinstance(condition.condition, Exists)
        and condition.condition.ref.path.rpartition(".")[2] == fact.attribute
        for condition in fact.place.reach
    )


def _overwritten(context: Context, fact: PatchFact, found: Resolution, standing: Standing) -> Iterator[Finding]:
    """What every instance sets for itself hides what the class has."""
    if context.target.index.kinds_of(found) != {Binds.INSTANCE} or fact.may_create:
        return
    symbol = found.symbol
    if symbol is None or symbol.conditional:
        return
    owner = f"{found.module}:{found.qualname.rpartition('.')[0]}"
    message = f"{owner} sets {fact.attribute} on each instance when it is made, which hides what the class has"
    if fact.is_plain:
        yield context.finding("BP201", fact.place, message, standing=standing)
    else:
        yield context.finding("BP901", fact.place, f"{message}, unless it is a descriptor")


def _doubt(found: list[tuple[Resolution, Resolution]], attribute: str) -> str:
    owner, member = next((o, m) for o, m in found if m.outcome is Outcome.UNKNOWN)
    return f"whether {owner.path} has {attribute} is not known: {member.reason}"


def remember(context: Context, number: int, found: Resolution) -> None:
    """Note down what is replaced, so that it can be compared with the same in another vLLM."""
    if not context.compares or found.symbol is None:
        return
    fact = context.facts[number]
    assert isinstance(fact, (PatchFact, KernelFact))
    try:
        fingerprint = context.target.index.fingerprint_of(found.module, found.qualname)
    except (SourceError, SyntaxError, RecursionError):
        return
    context.targets_found[context.file, number] = Upstream(found.path, fingerprint, found.symbol.signature)
