"""Which files of patches belong to one model or feature, told from their source.

Such a file is not even loaded before its target is imported: it may itself need the feature, and what is wrong with it
is of no concern to who does not use it.
"""

from __future__ import annotations

import ast


def waits_for(source: str) -> tuple[str, ...]:
    """The modules of vLLM that a file's patches wait for; empty if one of them does not wait, or that is not written
    out."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # importing it says so better
        return ()
    modules: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last(node.func) == "Patch":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            target, waits = (_constant(given.get(name)) for name in ("target", "on_import"))
            if waits is not True or not isinstance(target, str):
                return ()
            modules[target.partition(":")[0]] = None
    return tuple(modules)


def _last(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None
