"""Finds the modules of this process that imported an object by name from the module that defines it.

Most objects are recognized by identity. That does not work for numbers and strings, of which equal ones are often the
same object, nor for a class that has a second name. For those the source of the modules decides: what they import,
through re-exports and star imports.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any


def holders(owner: Any, attribute: str, value: Any) -> list[tuple[ModuleType, str]]:
    """Returns (module, name) of every module but `owner` that imported its `attribute`, whose value is `value`."""
    if not isinstance(owner, ModuleType):
        return []
    held = [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and module is not owner
        for name, there in list(vars(module).items())
        if there is value
    ]
    return held if _is_unique_object(owner, attribute, value) else list(_importers(owner, attribute, held))


def _is_unique_object(owner: ModuleType, attribute: str, value: Any) -> bool:
    """Returns whether every module that holds the object can have it only from `owner`."""
    if isinstance(value, Enum):
        return False
    home = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if home != (owner.__name__, attribute) and all(isinstance(part, str) for part in home):
        module, name = str(home[0]), str(home[1])
        if getattr(sys.modules.get(module), name, None) is value:
            return False  # it is defined in another module, and modules may have it from there
    return callable(value) or hasattr(value, "__dict__") or isinstance(value, (list, dict, set, bytearray))


def _importers(
    owner: ModuleType, attribute: str, held: list[tuple[ModuleType, str]]
) -> Iterator[tuple[ModuleType, str]]:
    """Yields those holders whose source imports the name from `owner`, directly or through one another."""
    texts = {module.__name__: _text(module) for module, _ in held}
    imports: dict[str, list[tuple[str, str, str]]] = {}
    found = {(owner.__name__, attribute)}
    pending = held
    while pending:
        left = []
        for module, name in pending:
            text = texts[module.__name__]
            if module.__name__ not in imports and ("import *" in text or any(known in text for _, known in found)):
                imports[module.__name__] = list(_imports(module, text))
            if any(
                (origin, name if imported == "*" else imported) in found and bound in (name, "*")
                for origin, imported, bound in imports.get(module.__name__, ())
            ):
                found.add((module.__name__, name))
                yield module, name
            else:
                left.append((module, name))
        if len(left) == len(pending):
            return
        pending = left


def _text(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # an extension or a generated module, which imports no constants
        return ""


def _imports(module: ModuleType, text: str) -> Iterator[tuple[str, str, str]]:
    """Yields (origin, imported name, bound name) for each import by name; both names are * for a star import."""
    try:
        pending: list[ast.AST] = [ast.parse(text)]
    except SyntaxError:
        return
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield origin, alias.name, alias.asname or alias.name
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            pending += ast.iter_child_nodes(node)
