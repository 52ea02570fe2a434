"""Methods that override vLLM's: signatures that do not fit (BP401), and upstream methods that are gone (BP402
to BP404).

What needs two versions to be seen is only noted down here, and compared when every vLLM has been looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_patchbay.audit.checks.context import Context, Upstream
from vllm_patchbay.audit.facts import ClassFact, MethodInfo, Place
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.vllm_target import Standing
from vllm_patchbay.upstream.modules import Binds, Calling, Symbol
from vllm_patchbay.upstream.signatures import Fault, Kind, Mismatch, Signature, mismatches
from vllm_patchbay.upstream.symbols import Outcome, Resolution

_NOT_COMPARED = frozenset({"__init__", "__new__", "__init_subclass__", "__post_init__", "__class_getitem__"})


def check(context: Context) -> Iterator[Finding]:
    for number, fact, standing in context.each(ClassFact):
        bases = _bases(context, fact)
        if not standing.for_types and any(_reaches_vllm(context, base) for base in bases):
            yield from _methods(context, number, fact, bases, standing)
            yield from _mixed_in(context, fact, bases, standing)
            yield from _supers(context, number, fact, bases, standing)
            _note_reads(context, number, fact, bases)


def _bases(context: Context, fact: ClassFact) -> list[Resolution]:
    """What the class inherits from with this vLLM. Where a base can be several things, the first that is there."""
    found = []
    for meanings in fact.bases:
        live = [context.target.find(meaning.ref) for meaning in context.judge.live(meanings)]
        classes = [base for base in live if base.is_class]
        found.append(classes[0] if classes else Resolution(Outcome.UNKNOWN, reason="a base class is not known"))
    return found


def _reaches_vllm(context: Context, base: Resolution) -> bool:
    line = context.target.index.ancestors(base.module, base.qualname) if base.is_class else None
    return line is not None and any(module.partition(".")[0] == "vllm" for module, _, _ in line.classes)


def inherited(context: Context, bases: list[Resolution], name: str) -> Resolution:
    unknown = None
    for base in bases:
        found = context.target.index.member(base, name) if base.is_class else base
        if found.is_found:
            return found
        if found.outcome is Outcome.UNKNOWN:
            unknown = found
    return unknown or Resolution(Outcome.MISSING, reason=f"no base class has {name}")


def _methods(
    context: Context, number: int, fact: ClassFact, bases: list[Resolution], standing: Standing
) -> Iterator[Finding]:
    for method in fact.methods:
        name = method.symbol.name
        if name in _NOT_COMPARED or (name.startswith("__") and not name.endswith("__")):
            continue
        found = inherited(context, bases, name)
        place = Place(method.line, method.column)
        key = (context.file, number, name)
        if found.is_missing:
            context.members_missing.add(key)
            if method.marked_override:
                message = f"{fact.name}.{name} is marked @override, and no base class has {name}"
                yield context.finding("BP402", place, message, standing=standing)
        elif found.is_found and found.symbol is not None and found.module.partition(".")[0] == "vllm":
            context.members_found[key] = Upstream(found.path, signature=found.symbol.signature)
            yield from _compare(context, fact, method, found, place, standing)


def _mixed_in(context: Context, fact: ClassFact, bases: list[Resolution], standing: Standing) -> Iterator[Finding]:
    """Methods of the plugin's own bases that come before vLLM's, and so override them here."""
    taken = set(fact.own)
    for number, base in enumerate(bases):
        line = context.target.index.ancestors(base.module, base.qualname) if base.is_class else None
        if line is None or _reaches_vllm(context, base):
            return
        for module, qualname, body in line.classes:
            for name, symbols in body.members.items():
                symbol = symbols[-1]
                if name in taken or name in _NOT_COMPARED or symbol.binds not in (Binds.FUNCTION, Binds.PROPERTY):
                    continue
                found = inherited(context, bases[number + 1 :], name)
                if found.is_found and found.symbol is not None and found.module.partition(".")[0] == "vllm":
                    method = MethodInfo(symbol, symbol.line, 1)
                    mixin = replace(fact, name=f"{qualname} (in {fact.name})")
                    file = context.plugin.tree.file_of(module)
                    place = Place(symbol.line, 1)
                    yield from _compare(context, mixin, method, found, place, standing, file)
            taken |= set(body.members)


def _compare(
    context: Context,
    fact: ClassFact,
    method: MethodInfo,
    found: Resolution,
    place: Place,
    standing: Standing,
    file: str = "",
) -> Iterator[Finding]:
    assert found.symbol is not None
    problems = differences(found.symbol, method.symbol)
    if not problems:
        return
    theirs, mine = found.symbol.signature, method.symbol.signature
    message = f"{fact.name}.{method.symbol.name} does not fit {found.path}: " + "; ".join(p.what for p in problems)
    if theirs is not None and mine is not None:
        message += f" (upstream {theirs}, override {mine})"
    severity = max(_SEVERITY[problem.fault] for problem in problems)
    # A model's forward takes what its own kind of model is given; the protocol shows the common case.
    is_example = method.symbol.name == "forward" and _is_protocol(context, found)
    if is_example:
        severity = Severity.NOTE
    finding = context.finding("BP401", place, message, severity=severity, standing=standing)
    finding = replace(finding, file=file or finding.file)
    if finding.severity is Severity.NOTE and not standing.guarded and not is_example:
        context.doubtful.append((finding, method.symbol.name, problems))
    else:
        yield finding


_SEVERITY = {
    Fault.ANY_CALL: Severity.ERROR,
    Fault.OMITS: Severity.WARNING,
    Fault.PASSES: Severity.WARNING,
    Fault.BY_NAME: Severity.NOTE,
    Fault.BY_POSITION: Severity.NOTE,
    Fault.ON_CLASS: Severity.NOTE,
    Fault.PASSES_MORE: Severity.NOTE,
}
"""A note becomes a warning where vLLM is seen to call a method of the name in the way that fails."""


def _is_protocol(context: Context, found: Resolution) -> bool:
    owner = context.target.index.resolve(found.module, found.qualname.rpartition(".")[0]).symbol
    return owner is not None and owner.body is not None and any(b.endswith("Protocol") for b in owner.body.bases)


def differences(upstream: Symbol, override: Symbol) -> tuple[Mismatch, ...]:
    """Why the override cannot be used as upstream's is."""
    functions = (Binds.FUNCTION, Binds.PROPERTY)
    if upstream.binds not in functions or override.binds not in functions:
        return ()
    if upstream.binds is not override.binds:
        return (Mismatch(Fault.ANY_CALL, f"upstream is a {_kind(upstream)} and the override is a {_kind(override)}"),)
    theirs, mine = upstream.signature, override.signature
    if theirs is None or mine is None:
        return ()
    called = _as_called(theirs, upstream.calling)
    found = mismatches(called, _as_called(mine, override.calling))
    if called.parameters and all(p.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD) for p in called.parameters):
        # With one star as with both, it promises nothing: a placeholder for overrides of any shape.
        found = tuple(mismatch for mismatch in found if not mismatch.is_about_arguments)
    if upstream.calling is not Calling.INSTANCE and override.calling is Calling.INSTANCE:
        what = "upstream's can be called on the class and the override needs an instance"
        found = (*found, Mismatch(Fault.ON_CLASS, what))
    return found


def _kind(symbol: Symbol) -> str:
    return "property" if symbol.binds is Binds.PROPERTY else "method"


def _as_called(signature: Signature, calling: Calling) -> Signature:
    return signature if calling is Calling.NOTHING else signature.without_first()


def _supers(
    context: Context, number: int, fact: ClassFact, bases: list[Resolution], standing: Standing
) -> Iterator[Finding]:
    for use in fact.super_uses:
        found = inherited(context, bases, use.name)
        if found.is_missing and use.name not in context.plugin.attributes_set:
            message = f"{fact.name} calls super().{use.name}, and no base class has {use.name}"
            yield context.finding("BP403", use.place, message, standing=standing)


def _note_reads(context: Context, number: int, fact: ClassFact, bases: list[Resolution]) -> None:
    if not context.compares:
        return
    for use in fact.self_reads:
        if use.name in fact.own:
            continue
        found = inherited(context, bases, use.name)
        key = (context.file, number, use.name)
        if found.is_missing:
            context.members_missing.add(key)
        elif found.is_found and found.module.partition(".")[0] == "vllm":
            context.members_found.setdefault(key, Upstream(found.path))
