"""Whether a patch fits a vLLM, from its source alone: nothing is imported, so any version can be asked about."""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from vllm_patchbay.patch.declaration import Fingerprint, Patch
from vllm_patchbay.upstream import (
    Resolution,
    Signature,
    SymbolIndex,
    fingerprint,
    in_range,
    is_beyond,
    kept_tree,
    mismatches,
)
from vllm_patchbay.upstream.modules import Binds, Calling, Symbol
from vllm_patchbay.upstream.signatures import signature_of_node
from vllm_patchbay.upstream.source import SourceError


class Outcome(Enum):
    FITS = "fits"
    TOLERATED = "tolerated"
    """The target changed, and the patch says why that is harmless."""
    DRIFTED = "drifted"
    MISSING = "missing"
    INCOMPATIBLE = "incompatible"
    """It cannot take the target's place: another signature, or an attribute of a base class."""
    NOT_NEEDED = "not needed"
    """Before the versions it is for, or taken out of them."""
    UNEXAMINED = "not yet examined"
    """Beyond the versions it is for: nobody has said whether this one needs it."""
    EXPIRED = "expired"
    """Its removal condition holds: it can go."""
    BROKEN = "cannot be loaded"
    """Its file fails, so that nothing is known of it."""

    @property
    def applies(self) -> bool:
        return self in (Outcome.FITS, Outcome.TOLERATED, Outcome.DRIFTED, Outcome.UNEXAMINED)

    @property
    def stops_a_start(self) -> bool:
        """Unless drift is only to be warned of."""
        return self in (Outcome.DRIFTED, Outcome.UNEXAMINED)

    @property
    def fails_a_check(self) -> bool:
        return self not in (Outcome.FITS, Outcome.TOLERATED, Outcome.NOT_NEEDED)


@dataclass(frozen=True, slots=True)
class Verdict:
    patch: str
    outcome: Outcome
    detail: str
    diff: str = ""
    fingerprint: str = ""
    """Of the target as this vLLM has it."""


def take_fingerprint(source: str) -> Fingerprint:
    """Of a target's normalised source: comments, docstrings and formatting have gone before."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return Fingerprint(fingerprint(source), tuple(hashlib.sha256(line.encode()).hexdigest()[:4] for line in lines))


def verify(patch: Patch, index: SymbolIndex, version: str) -> Verdict:
    if patch.expires is not None and in_range(version, patch.expires):
        return Verdict(
            patch.name, Outcome.EXPIRED, f"vLLM {version} needs it no more ({patch.remove_when}); remove {patch.module}"
        )
    beyond = is_beyond(version, patch.versions)
    if not beyond and not in_range(version, patch.versions):
        return Verdict(patch.name, Outcome.NOT_NEEDED, f"it is for vLLM {patch.versions}, and this is {version}")
    verdict = _verified(patch, index, version)
    return _unexamined(patch, verdict, version) if beyond and verdict.outcome.applies else verdict


def _unexamined(patch: Patch, verdict: Verdict, version: str) -> Verdict:
    detail = (
        f"it is for vLLM {patch.versions}, and nobody has examined whether {version} needs it ({verdict.detail}); "
        f"widen 'versions' of {patch.module}, or let it expire there"
    )
    return replace(verdict, outcome=Outcome.UNEXAMINED, detail=detail)


def _verified(patch: Patch, index: SymbolIndex, version: str) -> Verdict:
    target = index.resolve(patch.target_module, patch.target_name)
    absent = target.reason if not target.is_found else no_attribute(index, target)
    if absent:
        return Verdict(
            patch.name,
            Outcome.MISSING,
            f"{patch.target} does not exist in vLLM {version} ({absent}): an assignment to it would do nothing",
        )
    fault = _unsuitable(patch, index, target) or _made_on_demand(patch, index, target)
    if fault:
        return Verdict(patch.name, Outcome.INCOMPATIBLE, fault)
    return _compared(patch, index.normalised_source_of(target.module, target.qualname), version)


def no_attribute(index: SymbolIndex, target: Resolution) -> str:
    """Why a name that the source has is nothing that can be replaced, or an empty string."""
    kinds = index.kinds_of(target)
    if kinds and kinds <= {Binds.INSTANCE, Binds.ANNOTATION}:
        if Binds.INSTANCE in kinds:
            return "it is set on each instance, and the class has none"
        return "it is only annotated, and has no value"
    return ""


def _unsuitable(patch: Patch, index: SymbolIndex, target: Resolution) -> str:
    """Why the patch cannot take the target's place, or an empty string."""
    if "." in patch.target_name and target.qualname != patch.target_name:
        return f"{patch.target} is inherited from {target.path}; patch it there"
    if index.is_imported(patch.target_module, patch.target_name) and target.path != patch.target:
        # Under two names, two patches of one thing would not be seen to be rivals.
        return f"{patch.target} is imported from {target.path}; patch it there"
    is_value = target.symbol is not None and target.symbol.binds is Binds.ASSIGNMENT
    if is_value and "." not in patch.target_name and patch.is_decorated and _is_plain_value(index, target):
        return f"{patch.target} is a value, and a function would take its place; give a value with .value(…)"
    if not inspect.isclass(patch.replacement):
        return _misfit(patch.target, target.symbol, patch.replacement, of_class="." in patch.target_name)
    return class_misfit(patch, index, patch.replacement)


def class_misfit(patch: Patch, index: SymbolIndex, replacement: type) -> str:
    """Why a method of a class cannot take the place of the target's, or an empty string. A function that returns the
    class is only called when the patch is carried out, and the class is compared then."""
    target = index.resolve(patch.target_module, patch.target_name)
    members = (
        _misfit(f"{patch.target}.{name}", index.member(target, name).symbol, member, of_class=True)
        for name, member in vars(replacement).items()
    )
    return next(filter(None, members), "")


def _is_plain_value(index: SymbolIndex, target: Resolution) -> bool:
    """Whether a constant is written out, and so is nothing that could be called."""
    try:
        [statement, *_] = ast.parse(index.normalised_source_of(target.module, target.qualname)).body
        ast.literal_eval(getattr(statement, "value", None) or ast.Name("unknown"))
    except (SyntaxError, ValueError, SourceError):
        return False
    return True


def _misfit(name: str, symbol: Symbol | None, replacement: Any, *, of_class: bool) -> str:
    ours = _signature(replacement)
    if symbol is None or symbol.signature is None or ours is None:
        return ""
    theirs = symbol.signature
    if of_class and symbol.calling is not Calling.NOTHING:
        if not ours.positional and not ours.takes_any_positional:
            owner = theirs.positional[0].name if theirs.positional else "self"
            return f"its signature {ours} does not fit {name}{theirs}: {owner!r} is not accepted"
        theirs, ours = theirs.without_first(), ours.without_first()
    faults = mismatches(theirs, ours)
    return f"its signature {ours} does not fit {name}{theirs}: {faults[0].what}" if faults else ""


def _made_on_demand(patch: Patch, index: SymbolIndex, target: Resolution) -> str:
    """A name that the module's ``__getattr__`` serves is not there to be replaced."""
    return made_on_demand(index, patch.target_module, patch.target_name, target)


def made_on_demand(index: SymbolIndex, module: str, name: str, target: Resolution) -> str:
    first = name.partition(".")[0]
    content = index.module(module)
    if content is None or not content.is_lazy or content.star_imports:
        return ""
    if any(not symbol.for_type_checkers for symbol in content.names.get(first, ())):
        return ""
    served = f"{module} serves {first} on demand (__getattr__)"
    if target.path == f"{module}:{name}":
        return f"{served}, so that there is nothing to replace; patch what makes it, {module}:__getattr__"
    return f"{served}; it is {target.path}: patch it there"


def _signature(function: Any) -> Signature | None:
    """Of a live function, whether it has source or not; defaults and annotations do not matter."""
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    elif isinstance(function, property):
        function = function.fget
    elif isinstance(function, cached_property):
        function = function.func
    if not inspect.isfunction(function):
        return None
    live = inspect.signature(function, follow_wrapped=False)
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=... if parameter.default is not inspect.Parameter.empty else inspect.Parameter.empty,
        )
        for parameter in live.parameters.values()
    ]
    text = live.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    keyword = "async def" if inspect.iscoroutinefunction(function) else "def"
    node = ast.parse(f"{keyword} function{text}: ...").body[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return signature_of_node(node)


def _compared(patch: Patch, source: str, version: str) -> Verdict:
    """Whether the target is a source that the patch knows."""
    found = take_fingerprint(source)
    for known_version, known in patch.known().items():
        if known.digest == found.digest:
            return Verdict(patch.name, Outcome.FITS, f"the target is as in vLLM {known_version}", "", str(found))
    nearest_version, nearest = max(patch.known().items(), key=lambda item: _alike(item[1], found))
    before = _kept_source(patch, nearest_version, nearest)
    diff = shown_drift(source, nearest, found) if before is None else whole_drift(before, source)
    detail = f"{patch.target} in vLLM {version} is not what the patch was written against (vLLM {nearest_version})"
    if patch.tolerates_change is not None:
        return Verdict(
            patch.name, Outcome.TOLERATED, f"{detail}; tolerated: {patch.tolerates_change}", diff, str(found)
        )
    return Verdict(patch.name, Outcome.DRIFTED, detail, diff, str(found))


def _alike(known: Fingerprint, found: Fingerprint) -> float:
    return difflib.SequenceMatcher(None, known.lines, found.lines, autojunk=False).ratio()


def _kept_source(patch: Patch, version: str, known: Fingerprint) -> str | None:
    """What the target was, where the source of that vLLM has been fetched before."""
    tree = kept_tree(version) if patch.target_module.partition(".")[0] == "vllm" else None
    index = SymbolIndex(tree) if tree is not None else None
    if index is None or not index.resolve(patch.target_module, patch.target_name).is_found:
        return None
    source = index.normalised_source_of(patch.target_module, patch.target_name)
    return source if take_fingerprint(source).digest == known.digest else None


def whole_drift(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=3)
    return "\n".join(f"  {line}" for line in list(lines)[2:])


def shown_drift(source: str, known: Fingerprint, found: Fingerprint) -> str:
    """A diff in which new lines are the installed ones, and lines that went are only counted: we keep no copy."""
    text = [line for line in source.splitlines() if line.strip()]
    shown = []
    matcher = difflib.SequenceMatcher(None, known.lines, found.lines, autojunk=False)
    for kind, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if kind == "equal":
            kept = text[new_from:new_to]
            if len(kept) > 4:
                kept = [*kept[:2], f"  … {len(kept) - 4} unchanged lines …", *kept[-2:]]
            shown += [f"    {line}" for line in kept]
        else:
            if old_to > old_from:
                shown.append(f"  - ({old_to - old_from} lines that were here changed or went)")
            shown += [f"  + {line}" for line in text[new_from:new_to]]
    return "\n".join(shown)
