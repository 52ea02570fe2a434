"""Verifies from vLLM's source whether a patch fits it. Nothing is imported, so this works for any version of vLLM."""

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
    cached_tree,
    fingerprint,
    in_range,
    is_beyond,
    mismatches,
)
from vllm_patchbay.upstream.modules import Binds, MethodKind, Symbol
from vllm_patchbay.upstream.signatures import signature_of_node
from vllm_patchbay.upstream.source import SourceError


class Outcome(Enum):
    """Names whether and why a patch can be applied to a vLLM."""

    FITS = "fits"
    """The target is one that the patch was written against."""
    TOLERATED = "tolerated"
    """The target changed, and the patch declares why that is harmless."""
    DRIFTED = "drifted"
    """The target changed."""
    MISSING = "missing"
    """The target does not exist."""
    INCOMPATIBLE = "incompatible"
    """The replacement cannot take the target's place: its signature differs, or the target is defined elsewhere."""
    NOT_NEEDED = "not needed"
    """The vLLM is before the versions that the patch is for, or excluded from them."""
    UNEXAMINED = "not yet examined"
    """The vLLM is later than the versions that the patch is for, so its need of the patch has not been examined."""
    EXPIRED = "expired"
    """The vLLM no longer needs the patch, which can be removed."""
    BROKEN = "cannot be loaded"
    """The file of the patch cannot be imported."""

    @property
    def applies(self) -> bool:
        """Returns whether the patch is applied, given leave where `blocks_startup` is true."""
        return self in (Outcome.FITS, Outcome.TOLERATED, Outcome.DRIFTED, Outcome.UNEXAMINED)

    @property
    def blocks_startup(self) -> bool:
        """Returns whether the patch is an error at start-up, unless the session's `drift` is 'warn'."""
        return self in (Outcome.DRIFTED, Outcome.UNEXAMINED)

    @property
    def fails_check(self) -> bool:
        """Returns whether ``vllm-patchbay check`` fails because of the patch."""
        return self not in (Outcome.FITS, Outcome.TOLERATED, Outcome.NOT_NEEDED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds the result of verifying one patch against one vLLM."""

    patch: str
    outcome: Outcome
    detail: str
    diff: str = ""
    fingerprint: str = ""
    """Fingerprint of the target in this vLLM."""


def take_fingerprint(source: str) -> Fingerprint:
    """Returns the fingerprint of a target's normalized source, which has no comments and docstrings."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return Fingerprint(fingerprint(source), tuple(hashlib.sha256(line.encode()).hexdigest()[:4] for line in lines))


def verify(patch: Patch, index: SymbolIndex, version: str) -> Verdict:
    """Returns whether a patch fits the vLLM whose source `index` reads."""
    if patch.expires is not None and in_range(version, patch.expires):
        return Verdict(
            patch.name,
            Outcome.EXPIRED,
            f"vLLM {version} no longer needs it ({patch.remove_when}); remove {patch.module}",
        )
    beyond = is_beyond(version, patch.versions)
    if not beyond and not in_range(version, patch.versions):
        return Verdict(patch.name, Outcome.NOT_NEEDED, f"it is for vLLM {patch.versions}, and this is {version}")
    verdict = _verify_target(patch, index, version)
    return _unexamined(patch, verdict, version) if beyond and verdict.outcome.applies else verdict


def _unexamined(patch: Patch, verdict: Verdict, version: str) -> Verdict:
    detail = (
        f"it is for vLLM {patch.versions}, and whether {version} needs it has not been examined ({verdict.detail}); "
        f"widen 'versions' in {patch.module}, or set 'expires'"
    )
    return replace(verdict, outcome=Outcome.UNEXAMINED, detail=detail)


def _verify_target(patch: Patch, index: SymbolIndex, version: str) -> Verdict:
    """Returns whether the target exists, can be replaced, and has a source that the patch was written against."""
    target = index.resolve(patch.target_module, patch.target_name)
    absent = target.reason if not target.is_found else absence_reason(index, target)
    if absent:
        return Verdict(
            patch.name,
            Outcome.MISSING,
            f"{patch.target} does not exist in vLLM {version} ({absent}); adapt the patch, or remove it",
        )
    fault = _incompatibility(patch, index, target)
    fault = fault or on_demand_reason(index, patch.target_module, patch.target_name, target)
    if fault:
        return Verdict(patch.name, Outcome.INCOMPATIBLE, fault)
    return _compare_source(patch, index.normalized_source_of(target.module, target.qualname), version)


def absence_reason(index: SymbolIndex, target: Resolution) -> str:
    """Returns why a name in the source is not an attribute at run time, or an empty string if it is one."""
    kinds = index.kinds_of(target)
    if kinds and kinds <= {Binds.INSTANCE, Binds.ANNOTATION}:
        if Binds.INSTANCE in kinds:
            return "it is set on each instance and is no attribute of the class"
        return "it is only annotated and has no value"
    return ""


def _incompatibility(patch: Patch, index: SymbolIndex, target: Resolution) -> str:
    """Returns why the replacement cannot take the target's place, or an empty string."""
    if "." in patch.target_name and target.qualname != patch.target_name:
        return f"{patch.target} is inherited from {target.path}; patch it there"
    if index.is_imported(patch.target_module, patch.target_name) and target.path != patch.target:
        # Two patches of one object under two names would not be recognized as conflicting.
        return f"{patch.target} is imported from {target.path}; patch it there"
    is_value = target.symbol is not None and target.symbol.binds is Binds.ASSIGNMENT
    if is_value and "." not in patch.target_name and patch.is_decorated and _is_plain_value(index, target):
        return f"{patch.target} is a value, and its replacement is a function; declare a value with .value(…)"
    if not inspect.isclass(patch.replacement):
        return _signature_incompatibility(
            patch.target, target.symbol, patch.replacement, of_class="." in patch.target_name
        )
    return class_incompatibility(patch, index, patch.replacement)


def class_incompatibility(patch: Patch, index: SymbolIndex, replacement: type) -> str:
    """Returns why a method of the replacement class cannot take the place of the target's, or an empty string.

    A replacement that is a function returns its class when the patch is applied, so its methods are compared then.
    """
    target = index.resolve(patch.target_module, patch.target_name)
    members = (
        _signature_incompatibility(f"{patch.target}.{name}", index.member(target, name).symbol, member, of_class=True)
        for name, member in vars(replacement).items()
    )
    return next(filter(None, members), "")


def _is_plain_value(index: SymbolIndex, target: Resolution) -> bool:
    """Returns whether the target is bound to a literal, which cannot be called."""
    try:
        [statement, *_] = ast.parse(index.normalized_source_of(target.module, target.qualname)).body
        ast.literal_eval(getattr(statement, "value", None) or ast.Name("unknown"))
    except (SyntaxError, ValueError, SourceError):
        return False
    return True


def _signature_incompatibility(name: str, symbol: Symbol | None, replacement: Any, *, of_class: bool) -> str:
    """Returns which calls of the target fail with the replacement's signature, or an empty string."""
    ours = _signature(replacement)
    if symbol is None or symbol.signature is None or ours is None:
        return ""
    theirs = symbol.signature
    if of_class and symbol.method_kind is not MethodKind.STATIC:
        if not ours.positional and not ours.takes_any_positional:
            owner = theirs.positional[0].name if theirs.positional else "self"
            return f"its signature {ours} does not fit {name}{theirs}: {owner!r} is not accepted"
        theirs, ours = theirs.without_first(), ours.without_first()
    faults = mismatches(theirs, ours)
    return f"its signature {ours} does not fit {name}{theirs}: {faults[0].what}" if faults else ""


def on_demand_reason(index: SymbolIndex, module: str, name: str, target: Resolution) -> str:
    """Returns why a name cannot be replaced because the module's ``__getattr__`` creates it, or an empty string."""
    first = name.partition(".")[0]
    content = index.module(module)
    if content is None or not content.is_lazy or content.star_imports:
        return ""
    if any(not symbol.for_type_checkers for symbol in content.names.get(first, ())):
        return ""
    created = f"{module} creates {first} on demand (__getattr__)"
    if target.path == f"{module}:{name}":
        return f"{created}, so it is no attribute that can be replaced; patch {module}:__getattr__"
    return f"{created}; it is {target.path}: patch it there"


def _signature(function: Any) -> Signature | None:
    """Returns the signature of a live function, with or without source, or None for anything else. Defaults and
    annotations are left out."""
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


def _compare_source(patch: Patch, source: str, version: str) -> Verdict:
    """Returns whether the source of the target is one that the patch was written against."""
    found = take_fingerprint(source)
    fingerprints = patch.known_fingerprints()
    for known_version, known in fingerprints.items():
        if known.digest == found.digest:
            return Verdict(
                patch.name, Outcome.FITS, f"the target is the same as in vLLM {known_version}", "", str(found)
            )
    nearest_version, nearest = max(fingerprints.items(), key=lambda item: similarity(item[1], found))
    before = _cached_source(patch, nearest_version, nearest)
    diff = diff_by_digests(source, nearest, found) if before is None else diff_by_text(before, source)
    detail = f"{patch.target} in vLLM {version} is not what the patch was written against (vLLM {nearest_version})"
    if patch.tolerates_change is not None:
        return Verdict(
            patch.name, Outcome.TOLERATED, f"{detail}; tolerated: {patch.tolerates_change}", diff, str(found)
        )
    return Verdict(patch.name, Outcome.DRIFTED, detail, diff, str(found))


def similarity(known: Fingerprint, found: Fingerprint) -> float:
    """Returns the share of lines, between 0 and 1, that two sources have in common."""
    return difflib.SequenceMatcher(None, known.lines, found.lines, autojunk=False).ratio()


def _cached_source(patch: Patch, version: str, known: Fingerprint) -> str | None:
    """Returns the target's source in another version of vLLM, or None if the cache does not have that version."""
    tree = cached_tree(version) if patch.target_module.partition(".")[0] == "vllm" else None
    index = SymbolIndex(tree) if tree is not None else None
    if index is None or not index.resolve(patch.target_module, patch.target_name).is_found:
        return None
    source = index.normalized_source_of(patch.target_module, patch.target_name)
    return source if take_fingerprint(source).digest == known.digest else None


def diff_by_text(before: str, after: str) -> str:
    """Returns a diff of two sources."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=3)
    return "\n".join(f"  {line}" for line in list(lines)[2:])


def diff_by_digests(source: str, known: Fingerprint, found: Fingerprint) -> str:
    """Returns a diff of a source and a fingerprint. It shows the new lines, and only counts the old ones: the
    fingerprint has their digests and not their text."""
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
                count = old_to - old_from
                shown.append(f"  - ({count} {'line' if count == 1 else 'lines'} removed or changed)")
            shown += [f"  + {line}" for line in text[new_from:new_to]]
    return "\n".join(shown)
