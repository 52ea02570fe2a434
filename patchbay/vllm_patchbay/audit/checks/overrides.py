"""Checks methods that override vLLM's: signatures (BP401) and members that no base class has (BP402, BP403).

Findings that need two vLLMs (BP402, BP404) come from `audit.comparison`. For them, the inherited members are recorded
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_patchbay.audit.checks.context import Context, UpstreamDefinition
from vllm_patchbay.audit.facts import ClassFact, MethodInfo, Place
from vllm_patchbay.audit.findings import Finding
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.vllm_target import Reachability
from vllm_patchbay.upstream.modules import Binds, MethodKind, Symbol
from vllm_patchbay.upstream.signatures import Fault, Kind, Mismatch, Signature, mismatches
from vllm_patchbay.upstream.symbols import Outcome, Resolution

_NOT_COMPARED = frozenset({"__init__", "__new__", "__init_subclass__", "__post_init__", "__class_getitem__"})


def check(context: Context) -> Iterator[Finding]:
    for number, fact, reachability in context.each(ClassFact):
        bases = bases_of(context, fact)
        if not reachability.type_checking_only and any(reaches_vllm(context, base) for base in bases):
            yield from _methods(context, number, fact, bases, reachability)
            yield from _mixin_methods(context, fact, bases, reachability)
            yield from _super_calls(context, fact, bases, reachability)
            _record_self_reads(context, number, fact, bases)


def bases_of(context: Context, fact: ClassFact) -> list[Resolution]:
    """Returns the base classes of a class with this vLLM. If a base may be several classes, the first one that exists
    counts."""
    found = []
    for meanings in fact.bases:
        live = [context.target.find(meaning.ref) for meaning in context.evaluator.live_meanings(meanings)]
        classes = [base for base in live if base.is_class]
        found.append(classes[0] if classes else Resolution(Outcome.UNKNOWN, reason="a base class is unknown"))
    return found


def reaches_vllm(context: Context, base: Resolution) -> bool:
    """Returns whether a base class is a class of vLLM or derives from one."""
    ancestors = context.target.index.ancestors(base.module, base.qualname) if base.is_class else None
    return ancestors is not None and any(module.partition(".")[0] == "vllm" for module, _, _ in ancestors.classes)


def inherited(context: Context, bases: list[Resolution], name: str) -> Resolution:
    """Resolves a member in the base classes; unknown if a base that is not fully known may have it."""
    unknown = None
    for base in bases:
        found = context.target.index.member(base, name) if base.is_class else base
        if found.is_found:
            return found
        if found.outcome is Outcome.UNKNOWN:
            unknown = found
    return unknown or Resolution(Outcome.MISSING, reason=f"no base class has {name}")


def _methods(
    context: Context, number: int, fact: ClassFact, bases: list[Resolution], reachability: Reachability
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
                yield context.finding("BP402", place, message, reachability=reachability)
        elif found.is_found and found.symbol is not None and found.module.partition(".")[0] == "vllm":
            context.members_found[key] = UpstreamDefinition(found.path, signature=found.symbol.signature)
            yield from _compare(context, fact, method, found, place, reachability)


def _mixin_methods(
    context: Context, fact: ClassFact, bases: list[Resolution], reachability: Reachability
) -> Iterator[Finding]:
    """Checks the methods of plugin mixins that precede the vLLM base, and so override its methods in this class."""
    taken = set(fact.own)
    for number, base in enumerate(bases):
        ancestors = context.target.index.ancestors(base.module, base.qualname) if base.is_class else None
        if ancestors is None or reaches_vllm(context, base):
            return
        for module, qualname, body in ancestors.classes:
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
                    yield from _compare(context, mixin, method, found, place, reachability, file)
            taken |= set(body.members)


def _compare(
    context: Context,
    fact: ClassFact,
    method: MethodInfo,
    found: Resolution,
    place: Place,
    reachability: Reachability,
    file: str = "",
) -> Iterator[Finding]:
    assert found.symbol is not None
    problems = differences(found.symbol, method.symbol)
    if not problems:
        return
    upstream_signature, override_signature = found.symbol.signature, method.symbol.signature
    message = f"{fact.name}.{method.symbol.name} does not fit {found.path}: " + "; ".join(p.what for p in problems)
    if upstream_signature is not None and override_signature is not None:
        message += f" (upstream {upstream_signature}, override {override_signature})"
    severity = max(_SEVERITY[problem.fault] for problem in problems)
    # Models of different kinds take different arguments in forward; the protocol declares the common ones only.
    is_example = method.symbol.name == "forward" and _is_protocol(context, found)
    if is_example:
        severity = Severity.NOTE
    finding = context.finding("BP401", place, message, severity=severity, reachability=reachability)
    finding = replace(finding, file=file or finding.file)
    if finding.severity is Severity.NOTE and not reachability.guarded and not is_example:
        context.undecided.append((finding, method.symbol.name, problems))
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
"""Severity of each kind of mismatch. A note becomes a warning if vLLM's source has a call that fails
(`audit.caller_evidence`)."""


def _is_protocol(context: Context, found: Resolution) -> bool:
    owner = context.target.index.resolve(found.module, found.qualname.rpartition(".")[0]).symbol
    return owner is not None and owner.body is not None and any(b.endswith("Protocol") for b in owner.body.bases)


def differences(upstream: Symbol, override: Symbol) -> tuple[Mismatch, ...]:
    """Returns the reasons why the override cannot be called like upstream's method."""
    functions = (Binds.FUNCTION, Binds.PROPERTY)
    if upstream.binds not in functions or override.binds not in functions:
        return ()
    if upstream.binds is not override.binds:
        return (Mismatch(Fault.ANY_CALL, f"upstream is a {_kind(upstream)} and the override is a {_kind(override)}"),)
    upstream_signature, override_signature = upstream.signature, override.signature
    if upstream_signature is None or override_signature is None:
        return ()
    called = _as_called(upstream_signature, upstream.method_kind)
    found = mismatches(called, _as_called(override_signature, override.method_kind))
    if called.parameters and all(p.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD) for p in called.parameters):
        # A signature of *args or **kwargs alone is a placeholder for overrides with any arguments.
        found = tuple(mismatch for mismatch in found if not mismatch.is_about_arguments)
    if upstream.method_kind is not MethodKind.INSTANCE and override.method_kind is MethodKind.INSTANCE:
        what = "upstream's method can be called on the class, and the override needs an instance"
        found = (*found, Mismatch(Fault.ON_CLASS, what))
    return found


def _kind(symbol: Symbol) -> str:
    return "property" if symbol.binds is Binds.PROPERTY else "method"


def _as_called(signature: Signature, method_kind: MethodKind) -> Signature:
    return signature if method_kind is MethodKind.STATIC else signature.without_first()


def _super_calls(
    context: Context, fact: ClassFact, bases: list[Resolution], reachability: Reachability
) -> Iterator[Finding]:
    """Reports members that methods read from super() and that no base class has."""
    for use in fact.super_uses:
        found = inherited(context, bases, use.name)
        if found.is_missing and use.name not in context.plugin.attributes_set:
            message = f"{fact.name} calls super().{use.name}, and no base class has {use.name}"
            yield context.finding("BP403", use.place, message, reachability=reachability)


def _record_self_reads(context: Context, number: int, fact: ClassFact, bases: list[Resolution]) -> None:
    """Records the inherited members that methods read from self, for comparison with another vLLM."""
    if not context.compares_versions:
        return
    for use in fact.self_reads:
        if use.name in fact.own:
            continue
        found = inherited(context, bases, use.name)
        key = (context.file, number, use.name)
        if found.is_missing:
            context.members_missing.add(key)
        elif found.is_found and found.module.partition(".")[0] == "vllm":
            context.members_found.setdefault(key, UpstreamDefinition(found.path))
