"""Checks in a vLLM's source that every name exists that our package binds, overrides or uses.

Neither side is imported: the package is read from a folder, and vLLM from a wheel or a source tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from vllm_backplane.binding.operator_callers import IR_OPERATOR, RUNNER_KERNEL, Hook
from vllm_backplane.binding.registry import Binding
from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.checks.overrides import bases_of, inherited, reaches_vllm
from vllm_patchbay.audit.facts import ClassFact
from vllm_patchbay.audit.plugin import Plugin
from vllm_patchbay.audit.plugin_files import collect
from vllm_patchbay.audit.run import read_one
from vllm_patchbay.audit.vllm_target import ConditionEvaluator, VllmTarget
from vllm_patchbay.upstream import Resolution, SourceTree, SymbolIndex, mismatches
from vllm_patchbay.upstream.call_sites import calls_of
from vllm_patchbay.upstream.modules import Binds, ClassBody
from vllm_patchbay.upstream.signatures import Kind
from vllm_patchbay.upstream.source import FolderTree
from vllm_patchbay.upstream.symbols import Outcome

REPLACEABLE = {"CustomOp", "PluggableLayer"}
"""Base classes whose instantiation looks up a registered replacement."""


def index_of(package: Path, tree: SourceTree) -> SymbolIndex:
    return SymbolIndex(tree, FolderTree(package, "0", package.name))


# --- the declarations in binding/registry.py and binding/operator_callers.py


def faults_of_bindings(index: SymbolIndex, bindings: Iterable[Binding]) -> Iterator[str]:
    for binding in bindings:
        ancestry = index.ancestors(*binding.upstream.split(":"))
        if ancestry is None:
            yield f"{binding.upstream}: there is no such class"
        elif not REPLACEABLE & {name for _, name, _ in ancestry.classes}:
            yield f"{binding.upstream}: it never looks up a replacement"
        else:
            yield from _not_derived(index, binding.replacement, binding.upstream)


def faults_of_hooks(index: SymbolIndex, hooks: Iterable[Hook]) -> Iterator[str]:
    for hook in hooks:
        upstream = index.resolve(*hook.upstream.split(":"))
        if not upstream.is_found:
            yield f"{hook.upstream}: {upstream.reason}"
        elif hook.kind == RUNNER_KERNEL:
            yield from _unknown_arguments(index, hook)
        elif hook.kind == IR_OPERATOR:
            theirs, ours = (index.signature_of(*path.split(":")) for path in (hook.upstream, hook.replacement))
            if theirs is None or ours is None:
                yield f"{hook.upstream}: not a function, here or upstream"
            else:
                yield from (f"{hook.replacement}: {fault.what} ({hook.upstream})" for fault in mismatches(theirs, ours))
        else:
            yield from _not_derived(index, hook.replacement, hook.upstream)


def _not_derived(index: SymbolIndex, replacement: str, upstream: str) -> Iterator[str]:
    ancestry = index.ancestors(*replacement.split(":"))
    found = index.resolve(*upstream.split(":"))
    classes = {(module, name) for module, name, _ in ancestry.classes} if ancestry is not None else set()
    if (found.module, found.qualname) not in classes:
        yield f"{replacement}: not a subclass of {upstream}"


def _unknown_arguments(index: SymbolIndex, hook: Hook) -> Iterator[str]:
    """Yields the required parameters of a replacement that the kernel lacks; every supported vLLM must have them."""
    kernel, function = (index.signature_of(*path.split(":")) for path in (hook.upstream, hook.replacement))
    if kernel is None or function is None:
        yield f"{hook.upstream}: not a function, here or upstream"
        return
    known = {parameter.name for parameter in kernel.parameters}
    for parameter in function.parameters:
        if parameter.kind is Kind.KEYWORD_ONLY and not parameter.has_default and parameter.name not in known:
            yield f"{hook.upstream}: it has no argument {parameter.name}"


# --- methods and attributes of classes that are derived from vLLM's classes


class Presence:
    """Records, for each member of our classes derived from vLLM's classes, which of the given releases have it."""

    def __init__(self, package: Path, trees: Sequence[SourceTree]) -> None:
        collection = collect(package, [])
        self.plugin: Plugin = collection.plugin
        roots = self.plugin.packages | {"vllm"}
        self.plugin.gather([read_one(file, collection.wheel, roots) for file in self.plugin.files])
        self.trees = trees
        texts = [path.read_text() for path in package.rglob("*.py")]
        self.called_in_workers = {name for text in texts for name in re.findall(r'\bcollective_rpc\("(\w+)"', text)}
        """Names of methods that our code calls in the workers, through vLLM."""
        self.defined: dict[str, dict[str, Resolution]] = {}
        """Maps 'file:Class.member' to the overridden method or private attribute, by version."""
        self.origins: dict[str, str] = {}
        """Maps 'file:Class.member' to 'file:Mixin.member', for what a class has from a mixin: from a class of ours that
        is not derived from vLLM's itself."""
        self.read: dict[str, dict[str, Resolution]] = {}
        """Maps 'file:Class.attribute' to vLLM's attribute, for attributes of self that a class reads and never sets."""
        self._members: dict[str, dict[str, Resolution]] = {}
        self._modules = {file.name: file.module for file in self.plugin.files}
        for tree in trees:
            self._record(VllmTarget(tree, self.plugin))
        for ours, by_version in self._members.items():
            if any(each.is_found for each in by_version.values()):
                self.defined.setdefault(ours, by_version)

    def _record(self, target: VllmTarget) -> None:
        for file, facts in self.plugin.facts.items():
            context = Context(file, facts, target, ConditionEvaluator(target, facts), False, {}, {}, set(), [])
            for _, fact, _ in context.each(ClassFact):
                bases = bases_of(context, fact)
                if not any(reaches_vllm(context, base) for base in bases):
                    continue
                for method in fact.methods:
                    name = method.symbol.name
                    where = self.defined.setdefault(f"{file}:{fact.name}.{name}", {})
                    where[target.label] = inherited(context, bases, name)
                self._record_members(target, file, fact.name)
                for use in fact.self_reads:
                    if use.name not in fact.own:
                        where = self.read.setdefault(f"{file}:{fact.name}.{use.name}", {})
                        where[target.label] = inherited(context, bases, use.name)

    def _record_members(self, target: VllmTarget, file: str, name: str) -> None:
        """Records the private attributes that a class sets in its body, and what it has from its mixins."""
        found = target.index.ancestors(self._modules[file], name)
        classes = found.classes if found is not None else ()
        for place, (module, owner, body) in enumerate(classes):
            if module.partition(".")[0] == "vllm" or (place > 0 and _is_of_vllm(target.index, module, owner)):
                continue
            for member, symbols in body.members.items():
                is_private_value = symbols[-1].binds is Binds.ASSIGNMENT and member[0] == "_" != member[1:2]
                if is_private_value or (place > 0 and symbols[-1].binds in (Binds.FUNCTION, Binds.PROPERTY)):
                    ours = f"{file}:{name}.{member}"
                    of_vllm = _first_of_vllm(target.index, classes[place + 1 :], member)
                    self._members.setdefault(ours, {}).setdefault(target.label, of_vllm)
                    self.origins.setdefault(ours, f"{self.plugin.tree.file_of(module)}:{owner}.{member}")

    def not_in_every_release(self) -> dict[str, str]:
        """Maps 'module:Class.name' of vLLM, which only some of the releases have, to our use of it."""
        return {
            next(each.path for each in by_version.values() if each.is_found): ours
            for ours, by_version in {**self.read, **self.defined}.items()
            if any(each.is_found for each in by_version.values())
            and not all(each.is_found for each in by_version.values())
        }

    def faults(self, declared: Mapping[str, str]) -> Iterator[str]:
        """Yields what is wrong; `declared` is compat.NOT_IN_EVERY_RELEASE."""
        found = self.not_in_every_release()
        for upstream, ours in found.items():
            if upstream not in declared:
                yield f"{ours}: {upstream} is not in every vLLM, and compat.NOT_IN_EVERY_RELEASE does not list it"
        for upstream in declared.keys() - found.keys():
            yield f"compat.NOT_IN_EVERY_RELEASE: {upstream} is in every vLLM, in none, or not used"
        for ours, by_version in self.defined.items():
            if not any(each.is_found for each in by_version.values()):
                yield from self._uncalled(ours, ours.rpartition(".")[2])
        for ours, by_version in self.read.items():
            if all(each.is_missing for each in by_version.values()):
                yield f"{ours} is read, and nothing sets it"

    def _uncalled(self, ours: str, name: str) -> Iterator[str]:
        """Yields a fault for a method that no class of vLLM has, if neither our code nor vLLM's calls it."""
        if name in self.plugin.attributes_read or name in self.called_in_workers or name.startswith("__"):
            return
        for tree in self.trees:
            calls = calls_of(tree, [name])[name]
            if not calls.keywords and not calls.positional:
                yield f"{ours}: no class of vLLM {tree.version} has it, and nothing calls it"


def _is_of_vllm(index: SymbolIndex, module: str, name: str) -> bool:
    found = index.ancestors(module, name)
    return found is not None and any(each.partition(".")[0] == "vllm" for each, _, _ in found.classes)


def _first_of_vllm(index: SymbolIndex, classes: Iterable[tuple[str, str, ClassBody]], member: str) -> Resolution:
    for module, name, body in classes:
        if module.partition(".")[0] == "vllm" and member in body.members:
            return index.resolve(module, f"{name}.{member}")
    return Resolution(Outcome.MISSING, reason=f"no class of vLLM has {member}")
