"""What ``from x import *`` brings into a module, through any number of modules, in circles or not.

Worked out once per module: a package may have hundreds of star imports, and asking each of them for every name would
take longer than everything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vllm_patchbay.upstream.modules import ModuleSymbols
from vllm_patchbay.upstream.source import SourceTree


@dataclass(frozen=True, slots=True)
class Starred:
    origins: Mapping[str, tuple[str, ...]]
    """Modules that a name may come from, nearest first."""
    unknown: tuple[str, ...]
    """Why other names may come too."""


NOTHING = Starred({}, ())


def starred(
    content: ModuleSymbols,
    read: Callable[[str], ModuleSymbols | str],
    tree_of: Callable[[str], SourceTree | None],
) -> Starred:
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
        for name in _brought(module):
            origins.setdefault(name, []).append(origin)
        for name in _children(tree).get(origin, ()):
            # Only those that someone has imported, which cannot be told.
            origins.setdefault(name, []).append(origin)
        if module.exported is None:
            pending += module.star_imports
            if module.is_lazy and module.lazy_names is None:
                unknown.append(f"{origin} makes names up on demand (__getattr__)")
    return Starred({name: tuple(modules) for name, modules in origins.items()}, tuple(unknown))


def _brought(module: ModuleSymbols) -> Iterable[str]:
    if module.exported is not None:
        return module.exported
    bound = (
        name
        for name, symbols in module.names.items()
        if not name.startswith("_") and not all(symbol.for_type_checkers for symbol in symbols)
    )
    return [*bound, *(module.lazy_names or ())]


def _children(tree: SourceTree) -> dict[str, list[str]]:
    """Names of the modules directly below each package."""
    found: dict[str, list[str]] | None = tree.derived.get("children")
    if found is None:
        found = tree.derived["children"] = {}
        for module in tree.module_names:
            parent, _, name = module.rpartition(".")
            found.setdefault(parent, []).append(name)
    return found
