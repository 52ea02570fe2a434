"""Finds methods that are new in classes of vLLM that a plugin extends, and the patches that they may replace."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from vllm_patchbay.audit.plugin import Plugin
from vllm_patchbay.audit.vllm_target import VllmTarget
from vllm_patchbay.upgrade.items import Item, Section
from vllm_patchbay.upgrade.plugin_changes import Derived, declarations
from vllm_patchbay.upstream.modules import MethodKind
from vllm_patchbay.upstream.source import SourceTree

_COMMON_WORDS = 2
"""Words that a new hook must share with a patch in order to be named as its replacement."""
_COMMON = frozenset({"platform", "return", "whether", "device", "method", "default", "vllm", "given", "value", "which"})
"""Words that do not identify what a hook is about."""


def hooks(plugin: Plugin, derived: list[Derived], old: VllmTarget, new: VllmTarget) -> Iterator[Item]:
    """Yields public methods that are new in a class of vLLM that the plugin extends, and for each the patches that it
    may replace: those whose removal condition shares words with it."""
    patched = [declared for declared in declarations(plugin) if declared.is_patch and declared.targets]
    places: dict[tuple[str, str], list[str]] = {}
    for each in derived:
        for base in each.bases.get(new.label, ()):
            ancestors = new.index.ancestors(base.module, base.qualname) if base.is_class else None
            for module, qualname, _ in ancestors.classes if ancestors is not None else ():
                if module.partition(".")[0] == "vllm":
                    places.setdefault((module, qualname), []).append(f"{each.file}:{each.fact.place.line}")
    for (module, qualname), found in places.items():
        before, after = (target.index.resolve(module, qualname) for target in (old, new))
        if not (before.is_class and after.is_class):
            continue
        assert before.symbol is not None and before.symbol.body is not None
        assert after.symbol is not None and after.symbol.body is not None
        for name, symbols in after.symbol.body.members.items():
            is_new = name not in before.symbol.body.members and not name.startswith("_")
            if is_new and symbols[-1].signature is not None:
                purpose = _first_line(new.tree, module, f"{qualname}.{name}")
                kind = "class method" if symbols[-1].method_kind is MethodKind.CLASS else "method"
                text = f"is a new {kind}" + (f": {purpose.rstrip('.')}" if purpose else "")
                for declared in patched:
                    until = str(declared.given.get("remove_when") or "")
                    common = _words(f"{name} {purpose}") & _words(f"{until} {declared.targets[0].rpartition(':')[2]}")
                    if len(common) >= _COMMON_WORDS:
                        words = ", ".join(sorted(common))
                        text += (
                            f"; it may replace the patch of {declared.targets[0]}, which goes when: {until} ({words})"
                        )
                yield Item(Section.HOOKS, f"{module}:{qualname}.{name}", text, tuple(dict.fromkeys(found)))


def _words(text: str) -> set[str]:
    """Returns the words of names and sentences that may identify their subject, without a plural's ending."""
    found = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
    return {word.removesuffix("s") for word in found if len(word) > 4} - _COMMON


def _first_line(tree: SourceTree, module: str, name: str) -> str:
    """Returns the first line of the docstring of a method, or an empty string."""
    scope: list[ast.stmt] = ast.parse(tree.read(module) or "").body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((each for each in scope if getattr(each, "name", None) == part), None)
        if node is None:
            return ""
        scope = getattr(node, "body", [])
    text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    return (text or "").strip().partition("\n")[0]
