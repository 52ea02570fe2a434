"""Finds what breaks in a plugin with another vLLM, and what changed under its overrides, registrations, patches and
guards."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.checks.overrides import bases_of, inherited, reaches_vllm
from vllm_patchbay.audit.checks.registrations import REPLACEABLE
from vllm_patchbay.audit.facts import ClassFact, KernelFact, RegisterFact
from vllm_patchbay.audit.plugin import Plugin
from vllm_patchbay.audit.rules import Severity
from vllm_patchbay.audit.run import Report
from vllm_patchbay.audit.vllm_target import ConditionEvaluator, VllmTarget
from vllm_patchbay.patch.guard import DECORATOR
from vllm_patchbay.patch.verification import diff_by_text
from vllm_patchbay.upgrade.items import Item, Section
from vllm_patchbay.upstream import Resolution, in_range
from vllm_patchbay.upstream.source import module_texts

FIXED_IF, FAULTY_WHILE = "fixed_if", "faulty_while"
_ISSUE = re.compile(r"/(?:issues|pull)/(\d+)")


def findings(report: Report, after: str) -> Iterator[Item]:
    """Yields the auditor's findings about the newer vLLM, one for each cause, with all its places."""
    causes: dict[tuple[Section, str, str, str], list[str]] = {}
    old = {(f.rule_id, f.file, f.line, f.column) for f in report.findings if f.vllm and f.vllm != after}
    for found in report.findings:
        if found.vllm != after or found.severity is Severity.NOTE:
            continue
        section = Section.BREAKS if found.severity is Severity.ERROR else Section.CHANGED
        remedy = f"{found.remedy or found.rule.remedy}"
        if (found.rule_id, found.file, found.line, found.column) in old:
            remedy += " (it was so before)"
        causes.setdefault((section, found.message, remedy, found.diff), []).append(f"{found.file}:{found.line}")
    for (section, message, remedy, diff), places in causes.items():
        yield Item(section, message, remedy, tuple(places), diff)


@dataclass(frozen=True)
class Derived:
    """Holds a class of the plugin that derives from classes of vLLM, as both releases have them."""

    file: str
    fact: ClassFact
    bases: Mapping[str, list[Resolution]]
    """Base classes by the label of the vLLM."""


def classes(*targets: VllmTarget) -> list[Derived]:
    """Returns the classes of the plugin that derive from vLLM's classes in one of the releases."""
    found: dict[tuple[str, int], tuple[str, ClassFact, dict[str, list[Resolution]]]] = {}
    for target in targets:
        for file, facts in target.plugin.facts.items():
            context = Context(file, facts, target, ConditionEvaluator(target, facts), False)
            for number, fact, reachability in context.each(ClassFact):
                bases = bases_of(context, fact)
                if not reachability.type_checking_only and any(reaches_vllm(context, base) for base in bases):
                    found.setdefault((file, number), (file, fact, {}))[2][target.label] = bases
    return [Derived(*each) for each in found.values()]


def _member(derived: Derived, target: VllmTarget, name: str) -> Resolution | None:
    """Returns vLLM's member that a class would inherit under a name, or None if vLLM has none."""
    bases = derived.bases.get(target.label)
    if bases is None:
        return None
    context = Context(derived.file, [], target, ConditionEvaluator(target, []), False)
    found = inherited(context, [base for base in bases if reaches_vllm(context, base)], name)
    is_defined = found.is_found and found.symbol is not None and found.symbol.signature is not None
    return found if is_defined and found.module.partition(".")[0] == "vllm" else None


@dataclass
class Dependency:
    """Describes how the plugin depends on a function or class of vLLM, by its names in both releases."""

    before: str
    after: str
    """Empty for an overridden method that the newer release does not have."""
    is_by_name: bool
    """Whether the plugin names it, as a patch or guard does; then it must not move."""
    reasons: list[str]
    places: list[str]


def dependencies(plugin: Plugin, derived: list[Derived], old: VllmTarget, new: VllmTarget) -> list[Dependency]:
    """Returns what the plugin overrides, replaces by registration, patches or guards, each once."""
    found: dict[tuple[str, str], Dependency] = {}

    def add(before: str, after: str, reason: str, place: str, *, is_by_name: bool = False) -> None:
        each = found.setdefault((before, after), Dependency(before, after, is_by_name, [], []))
        each.is_by_name |= is_by_name
        each.reasons += [reason] if reason not in each.reasons else []
        each.places += [place] if place not in each.places else []

    for each in derived:
        for name, place in _methods(each, new):
            before, after = (_member(each, target, name) for target in (old, new))
            if before is not None and (after is not None or _is_gone(each, new, name)):
                add(before.path, after.path if after is not None else "", "the plugin overrides it", place)
    for before_name, after_name, place in _registered(old, new):
        add(before_name, after_name, "the plugin registers a replacement for it", place)
    for declared in declarations(plugin):
        versions = "" if declared.is_patch else str(declared.given.get("versions") or "")
        if versions and new.version is not None and not in_range(new.version, versions):
            continue  # the code is not used with this release
        for target in declared.targets:
            reason = f"code depends on it ({declared.given.get('why')})"
            reason = "a patch replaces it" if declared.is_patch else reason
            add(target, target, reason, declared.place, is_by_name=True)
    return list(found.values())


def _registered(old: VllmTarget, new: VllmTarget) -> Iterator[tuple[str, str, str]]:
    """Yields the classes and kernels of vLLM for which the plugin registers replacements, by their names in both
    releases, with the place. What only one release has is left to the auditor."""
    for file, facts in old.plugin.facts.items():
        context = Context(file, facts, old, ConditionEvaluator(old, facts), False)
        for _, registration, _ in context.each(RegisterFact):
            if registration.name:
                before, after = (each.survey.classes.get(registration.name, ()) for each in (old, new))
                pairs = [(module, module) for module in before if module in after]
                if not pairs and len(before) == len(after) == 1:
                    pairs = [(before[0], after[0])]  # it has moved
                for first, second in pairs:
                    place = f"{file}:{registration.place.line}"
                    yield f"{first}:{registration.name}", f"{second}:{registration.name}", place
                continue
            for meaning in context.evaluator.live_meanings(registration.owners):
                found, later = old.find(meaning.ref), new.find(meaning.ref)
                is_layer = found.module.startswith("vllm.") and found.qualname not in REPLACEABLE
                if found.is_class and later.is_class and is_layer:
                    yield found.path, later.path, f"{file}:{registration.place.line}"
        for _, kernel, _ in context.each(KernelFact):
            found, later = (each.index.resolve_path(kernel.path) for each in (old, new))
            if found.is_found and later.is_found:
                yield found.path, later.path, f"{file}:{kernel.place.line}"


def _methods(derived: Derived, target: VllmTarget) -> Iterator[tuple[str, str]]:
    """Yields the names and places of the methods that a class of the plugin puts before vLLM's: its own, and those of
    mixins of the plugin."""
    for method in derived.fact.methods:
        yield method.symbol.name, f"{derived.file}:{method.line}"
    for base in derived.bases.get(target.label, ()):
        ancestors = target.index.ancestors(base.module, base.qualname) if base.is_class else None
        for module, _, body in ancestors.classes if ancestors is not None else ():
            if module.partition(".")[0] == "vllm":
                return
            for name, symbols in body.members.items():
                if symbols[-1].signature is not None:
                    yield name, f"{target.plugin.tree.file_of(module)}:{symbols[-1].line}"


def _is_gone(derived: Derived, target: VllmTarget, name: str) -> bool:
    """Returns whether all base classes of a class are known, and none has a member."""
    context = Context(derived.file, [], target, ConditionEvaluator(target, []), False)
    bases = derived.bases.get(target.label)
    return bases is not None and inherited(context, bases, name).is_missing


def changed(found: list[Dependency], old: VllmTarget, new: VllmTarget) -> Iterator[Item]:
    """Yields the dependencies whose source changed or that are gone."""
    for each in found:
        why, places = " and ".join(each.reasons), tuple(each.places)
        before = old.index.resolve(*each.before.split(":"))
        if not each.after:
            yield Item(
                Section.BREAKS, each.before, f"does not exist any more: nothing calls the override; {why}", places
            )
            continue
        after = new.index.resolve(*each.after.split(":"))
        if before.is_found and not after.is_found:
            yield Item(Section.BREAKS, each.after, f"does not exist any more ({after.reason}), and {why}", places)
        if not before.is_found or not after.is_found:
            continue
        if each.is_by_name and after.path != each.after and before.path == each.before:
            yield Item(Section.BREAKS, each.after, f"is defined as {after.path} now, and {why} by its old name", places)
        first = old.index.normalized_source_of(before.module, before.qualname)
        second = new.index.normalized_source_of(after.module, after.qualname)
        if first != second:
            moved = f" and was {before.path}" if before.path != after.path else ""
            yield Item(Section.CHANGED, after.path, f"changed{moved}, and {why}", places, diff_by_text(first, second))


def new_abstract_methods(derived: list[Derived], old: VllmTarget, new: VllmTarget) -> Iterator[Item]:
    """Yields abstract methods that only the newer release has and that a class of the plugin does not define."""
    for each in derived:
        missing = _abstract(each, new) - _abstract(each, old) - {method.symbol.name for method in each.fact.methods}
        for name in sorted(missing - each.fact.own):
            found = _member(each, new, name)
            owner, _, method = found.path.partition(":")[2].rpartition(".") if found is not None else ("", "", "")
            if found is not None and method in _abstract_in(new, found.module).get(owner, ()):
                yield Item(
                    Section.BREAKS,
                    found.path,
                    f"is a new abstract method, and {each.fact.name} does not define it: the class cannot be "
                    "instantiated, unless it is a base of others that do",
                    (f"{each.file}:{each.fact.place.line}",),
                )


def _abstract(derived: Derived, target: VllmTarget) -> set[str]:
    """Returns the names of the abstract methods of vLLM's classes from which a class derives."""
    names: set[str] = set()
    for base in derived.bases.get(target.label, ()):
        ancestors = target.index.ancestors(base.module, base.qualname) if base.is_class else None
        for module, qualname, _ in ancestors.classes if ancestors is not None else ():
            names |= _abstract_in(target, module).get(qualname, set())
    return names


def _abstract_in(target: VllmTarget, module: str) -> dict[str, set[str]]:
    """Returns the names of the abstract methods in each class of a module."""
    cache: dict[str, dict[str, set[str]]] = target.tree.derived.setdefault("abstract methods", {})
    if module not in cache:
        tree = target.index.tree_of(module)
        source = (tree.read(module) if tree is not None else None) or ""
        cache[module] = {}
        if "abstractmethod" in source:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    cache[module][node.name] = {
                        each.name
                        for each in node.body
                        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
                        and any("abstractmethod" in ast.unparse(decorator) for decorator in each.decorator_list)
                    }
    return cache[module]


@dataclass(frozen=True)
class Declaration:
    """Holds a patch or a guard as it stands in the plugin's source."""

    is_patch: bool
    targets: tuple[str, ...]
    given: Mapping[str | None, object]
    """Keyword arguments that are literals."""
    place: str
    replacement: str = ""
    """Source of the function or class that a patch decorates, laid out by ``ast.unparse``."""


def declarations(plugin: Plugin) -> Iterator[Declaration]:
    """Yields the patches and guards that the plugin declares."""
    for file in plugin.files:
        source = plugin.tree.read(file.module) or ""
        if "Patch(" not in source and f"{DECORATOR}(" not in source:
            continue
        tree = ast.parse(source)
        decorated = {
            id(decorator): ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call) and _called(decorator.func) == "Patch"
        }
        for node in ast.walk(tree):
            kind = _called(node.func) if isinstance(node, ast.Call) else ""
            if kind in ("Patch", DECORATOR):
                assert isinstance(node, ast.Call)
                given = {each.arg: _literal(each.value) for each in node.keywords}
                named = [given.get("target")] if kind == "Patch" else [_literal(each) for each in node.args]
                targets = tuple(each for each in named if isinstance(each, str) and ":" in each)
                place = f"{file.name}:{node.lineno}"
                yield Declaration(kind == "Patch", targets, given, place, decorated.get(id(node), ""))


def patches(plugin: Plugin, old: VllmTarget, new: VllmTarget) -> Iterator[Item]:
    """Yields patches that may go, and those that were not examined for the newer release."""
    for declared in declarations(plugin):
        for target in declared.targets if declared.is_patch else ():
            yield from _expired_or_unexamined(target, declared, new)
            remedy = f": see whether the patch may go{_until(declared)}"
            for sign in (*_met_conditions(declared, old, new), *_mentions(declared, old, new)):
                yield Item(Section.MAY_GO, target, sign + remedy, _at(declared))
            if common := _adopted_lines(target, declared, old, new):
                sign, diff = "vLLM's change of it has lines of the replacement", (f"  +{line}" for line in common)
                yield Item(Section.MAY_GO, target, sign + remedy, _at(declared), "\n".join(diff))


def _at(declared: Declaration) -> tuple[str, ...]:
    return (declared.place,)


def _until(declared: Declaration) -> str:
    """Returns the removal condition of a patch, in parentheses."""
    return f" (when: {declared.given.get('remove_when') or 'not stated'})"


def _expired_or_unexamined(target: str, declared: Declaration, new: VllmTarget) -> Iterator[Item]:
    expires, versions = (str(declared.given.get(name) or "") for name in ("expires", "versions"))
    if new.version is None:
        return
    if expires and in_range(new.version, expires):
        what = f"the patch declares that vLLM {expires} does not need it; remove it"
        yield Item(Section.MAY_GO, target, what, _at(declared))
    if versions and not in_range(new.version, versions):
        what = f"the patch is for vLLM {versions}: decide whether it is still needed{_until(declared)}"
        yield Item(Section.CHANGED, target, what, _at(declared))


def _conditions(declared: Declaration) -> Iterator[tuple[str, str, str]]:
    """Yields name, function or class, and text of the conditions by which a patch recognizes its fix."""
    for name in (FIXED_IF, FAULTY_WHILE):
        condition = declared.given.get(name)
        if isinstance(condition, tuple) and len(condition) == 2 and str(condition[0]).count(":") == 1:
            yield name, str(condition[0]), str(condition[1])


def _met_conditions(declared: Declaration, old: VllmTarget, new: VllmTarget) -> Iterator[str]:
    """Yields which declared conditions the newer source meets. The auditor reports those whose function is gone."""
    for name, where, text in _conditions(declared):
        before, after = (text in _source(target, where) for target in (old, new))
        if after == (name == FIXED_IF) and _source(new, where):
            state = f"has {text!r}" if after else f"does not have {text!r}"
            since = "as before" if before == after else "now"
            yield f"seems to be fixed: {where} {state} {since} ({name})"


def _mentions(declared: Declaration, old: VllmTarget, new: VllmTarget) -> Iterator[str]:
    """Yields where the newer source mentions an upstream issue of a patch, if the older does not."""
    for number in _ISSUE.findall(str(declared.given.get("upstream") or "")):
        mention = re.compile(rf"(?:#|issues/|pull/){number}\b")
        now = [module for module, text in module_texts(new.tree) if mention.search(text)]
        if now and not any(mention.search(text) for _, text in module_texts(old.tree)):
            yield f"vLLM's source mentions its upstream issue {number} now, in {', '.join(now)}"


def _adopted_lines(target: str, declared: Declaration, old: VllmTarget, new: VllmTarget) -> list[str]:
    """Returns the lines of a replacement that are new in its target, without those that name fewer than two things."""
    before, after, ours = (
        dict.fromkeys(line.strip() for line in source.splitlines())
        for source in (_source(old, target), _source(new, target), declared.replacement)
    )
    return [line for line in after if line in ours and line not in before and before and _names_several(line)]


def _names_several(line: str) -> bool:
    names = [word for word in re.findall(r"[A-Za-z_]\w*", line) if not keyword.iskeyword(word)]
    return len(set(names)) > 1 and not line.startswith(("def ", "async def ", "class ", "@"))


def _source(target: VllmTarget, path: str) -> str:
    """Returns the normalized source of a function or class of vLLM, or an empty string if it does not exist."""
    found = target.index.resolve(*path.split(":"))
    return target.index.normalized_source_of(found.module, found.qualname) if found.is_found else ""


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
