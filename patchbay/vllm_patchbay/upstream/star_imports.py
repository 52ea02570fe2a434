"""Resolves the names that ``from x import *`` brings into a module, through any chain of modules, circular ones too.

The result is computed once per module: a package can have hundreds of star imports, and a search of each of them for
every name would take longer than everything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vllm_patchbay.upstream.modules import ModuleSymbols
from vllm_patchbay.upstream.source import SourceTree


@dataclass(frozen=True, slots=True)
class StarImports:
    """Holds the names that the star imports of one module bring in."""

    origins: Mapping[str, tuple[str, ...]]
    """Modules that a name may come from, nearest first."""
    unknown: tuple[str, ...]
    """Reasons why further names may be imported that the source does not show."""


NO_STAR_IMPORTS = StarImports({}, ())


def resolve_star_imports(
    content: ModuleSymbols,
    read: Callable[[str], ModuleSymbols | str],
    tree_of: Callable[[str], SourceTree | None],
) -> StarImports:
    """Returns what the star imports of a module bring in. `read` gives the content of a module or why there is none,
    and `tree_of` the source tree that a module belongs to."""
    origins: dict[str, list[str]] = {}
    unknown: list[str] = []
    seen = {content.name}
    pending = deque(content.star_imports)
    while pending:
        origin = pending.popleft()
        if origin in seen:
            continue
        seen.add(origin)
        tree = tree_of(origin)
        if tree is None:
            unknown.append(f"it may come from {origin} (import *)")
            continue
        if not tree.has(origin):
            continue
        module = read(origin)
        if isinstance(module, str):
            unknown.append(module)
            continue
        for name in _exported_names(module):
            origins.setdefault(name, []).append(origin)
        for name in _children(tree).get(origin, ()):
            # At run time only submodules that have been imported; the source does not show which.
            origins.setdefault(name, []).append(origin)
        if module.exported is None:
            pending += module.star_imports
            if module.is_lazy and module.lazy_names is None:
                unknown.append(f"{origin} creates names on demand (__getattr__)")
    return StarImports({name: tuple(modules) for name, modules in origins.items()}, tuple(unknown))


def _exported_names(module: ModuleSymbols) -> Iterable[str]:
    """Returns the names that ``from module import *`` imports."""
    if module.exported is not None:
        return module.exported
    bound = (
        name
        for name, symbols in module.names.items()
        if not name.startswith("_") and not all(symbol.for_type_checkers for symbol in symbols)
    )
    return [*bound, *(module.lazy_names or ())]


def _children(tree: SourceTree) -> dict[str, list[str]]:
    """Returns the names of the modules directly below each package."""
    found: dict[str, list[str]] | None = tree.derived.get("children")
    if found is None:
        found = tree.derived["children"] = {}
        for module in tree.module_names:
            parent, _, name = module.rpartition(".")
            found.setdefault(parent, []).append(name)
    return found
