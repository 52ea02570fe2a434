"""Summarizes the functions of a file before its statements are read.

Plugins often wrap their patches: in a helper that sets an attribute by name, or in a function that is called inside a
try statement. A statement can only be judged if these wrappers are known before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_patchbay.audit.facts import Catch
from vllm_patchbay.upstream.modules import children, dotted, walk

GUARDED_EXCEPTIONS = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"})
"""Exceptions that a missing module, name or attribute of vLLM raises, and their bases."""


@dataclass(slots=True)
class FunctionSummary:
    """Holds the properties of a file's top-level functions that the reader of its statements needs, each by name."""

    setters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Functions that call setattr with two of their parameters: the positions of the object and of the name."""
    caught: dict[str, tuple[Catch, ...]] = field(default_factory=dict)
    """Functions that are called inside try statements only, and what those catch."""
    helpers: dict[str, Helper] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Helper:
    """Describes a function that consists of imports and a return statement, so that calls of it can be evaluated."""

    parameters: tuple[str, ...]
    imports: tuple[tuple[str, str], ...]
    """Names that the function imports, and the dotted name of each."""
    value: ast.expr
    """The returned expression."""

    def accepts(self, call: ast.Call) -> bool:
        """Returns whether a call passes every parameter by position."""
        plain = not call.keywords and not any(isinstance(argument, ast.Starred) for argument in call.args)
        return plain and len(call.args) == len(self.parameters)


def helper_of(function: ast.FunctionDef) -> Helper | None:
    """Returns the function as a `Helper`; None if it does more than import and return."""
    given = function.args
    if given.vararg or given.kwarg or given.kwonlyargs or given.defaults:
        return None
    imports: list[tuple[str, str]] = []
    for statement in function.body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            parameters = tuple(argument.arg for argument in [*given.posonlyargs, *given.args])
            return Helper(parameters, tuple(imports), statement.value)
        if isinstance(statement, ast.Import):
            imports += [
                (a.asname or a.name.partition(".")[0], a.name if a.asname else a.name.partition(".")[0])
                for a in statement.names
            ]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            imports += [(a.asname or a.name, f"{statement.module}.{a.name}") for a in statement.names]
        elif not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
            return None
    return None


def summarize_functions(tree: ast.Module) -> FunctionSummary:
    """Returns the summary of a module's functions."""
    found = FunctionSummary()
    defined = {s.name for s in tree.body if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            helper = helper_of(statement)
            if helper is not None:
                found.helpers[statement.name] = helper
            setter = _setter(statement)
            if setter is not None:
                found.setters[statement.name] = setter
    uses: dict[str, list[tuple[Catch, ...]]] = {}
    # Most files call none of their functions in a try statement. For them, the second pass has nothing to do.
    watched = defined & _called_in_try(tree) if defined else defined
    for name, catches in _mentions(tree, watched, ()):
        uses.setdefault(name, []).append(catches)
    for name, places in uses.items():
        if all(places):
            found.caught[name] = places[0]
    return found


def _setter(function: ast.FunctionDef) -> tuple[int, int] | None:
    """Returns the positions of the parameters that the function passes to setattr as object and name, if it does."""
    parameters = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    for node in walk(function):
        if isinstance(node, ast.Call) and dotted(node.func) == "setattr" and len(node.args) == 3:
            owner, name = dotted(node.args[0]), dotted(node.args[1])
            if owner in parameters and name in parameters:
                return parameters.index(owner), parameters.index(name)
    return None


def _called_in_try(tree: ast.Module) -> set[str]:
    """Returns the names that are called in the body of a try statement that catches guarded exceptions."""
    return {
        call.func.id
        for node in walk(tree)
        if isinstance(node, (ast.Try, ast.TryStar)) and catch_of(node)
        for statement in node.body
        for call in walk(statement)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }


def _mentions(node: ast.AST, names: set[str], catches: tuple[Catch, ...]) -> Iterator[tuple[str, tuple[Catch, ...]]]:
    """Yields every mention of the named functions, and the try statements that would catch an exception of theirs
    there.

    A mention that is not a call gets none: the function may then be called anywhere.
    """
    if not names:
        return
    for child in children(node):
        if isinstance(child, (ast.Try, ast.TryStar)):
            inner = (*catches, *catch_of(child))
            for part in child.body:
                yield from _mentions(ast.Module([part], []), names, inner)
            for block in (*(handler.body for handler in child.handlers), child.orelse, child.finalbody):
                for part in block:
                    yield from _mentions(ast.Module([part], []), names, catches)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _mentions(child, names, ())
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in names:
            yield child.func.id, catches
            for argument in [*child.args, *(keyword.value for keyword in child.keywords)]:
                yield from _mentions(ast.Module([ast.Expr(argument)], []), names, catches)
        elif isinstance(child, ast.Name):
            if child.id in names:
                yield child.id, ()
        else:
            yield from _mentions(child, names, catches)


def catch_of(node: ast.Try | ast.TryStar) -> tuple[Catch, ...]:
    """Returns which of `GUARDED_EXCEPTIONS` a try statement catches without raising them again; empty if none."""
    handlers = [handler for handler in node.handlers if not _reraises(handler)]
    swallowed = frozenset().union(*map(caught_by, handlers)) & GUARDED_EXCEPTIONS if handlers else frozenset()
    return (Catch(swallowed, any(map(_has_import, node.handlers))),) if swallowed else ()


def caught_by(handler: ast.ExceptHandler) -> frozenset[str]:
    """Returns the names of the exception classes that an except clause lists."""
    if handler.type is None:
        return frozenset({"BaseException"})
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return frozenset(dotted(type_).rpartition(".")[2] for type_ in types)


def _reraises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(statement, ast.Raise) for statement in handler.body)


def _has_import(handler: ast.ExceptHandler) -> bool:
    return any(
        isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"))
        for statement in handler.body
        for node in walk(statement)
    )
