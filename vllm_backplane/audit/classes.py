"""A class of a plugin as a fact: its bases, its methods, and what it asks of what it inherits from."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from vllm_backplane.audit.facts import ClassFact, Meanings, MethodInfo, NamedUse, Place
from vllm_backplane.upstream.modules import Binds, class_body, dotted

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def class_fact(
    node: ast.ClassDef, bases: tuple[Meanings, ...], package: str, place: Place, place_of: Callable[[ast.AST], Place]
) -> ClassFact:
    body = class_body(node, package)
    definitions = {statement.name: statement for statement in node.body if isinstance(statement, _FUNCTION)}
    methods = []
    for name, symbols in body.members.items():
        symbol = symbols[-1]
        definition = definitions.get(name)
        if symbol.binds in (Binds.FUNCTION, Binds.PROPERTY) and definition is not None:
            marks = {dotted(decorator).rpartition(".")[2] for decorator in definition.decorator_list}
            methods.append(MethodInfo(symbol, definition.lineno, definition.col_offset + 1, "override" in marks))
    supers: list[NamedUse] = []
    reads: dict[str, NamedUse] = {}
    for definition in definitions.values():
        first = [*definition.args.posonlyargs, *definition.args.args]
        me = first[0].arg if first else ""
        for inner, guarded in _walk(definition):
            if not isinstance(inner, ast.Attribute) or guarded:
                continue
            owner = inner.value
            if isinstance(owner, ast.Call) and dotted(owner.func) == "super" and not owner.args:
                supers.append(NamedUse(inner.attr, place_of(inner)))
            elif isinstance(owner, ast.Name) and owner.id == me and isinstance(inner.ctx, ast.Load):
                reads.setdefault(inner.attr, NamedUse(inner.attr, place_of(inner)))
    return ClassFact(
        place, node.name, bases, tuple(methods), frozenset(body.members), tuple(supers), tuple(reads.values())
    )


def _walk(node: ast.AST, guarded: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, and whether something around it provides for its failing: hasattr, or except AttributeError."""
    for child in ast.iter_child_nodes(node):
        inner = guarded
        if isinstance(child, ast.ClassDef):
            continue
        if isinstance(child, (ast.Try, ast.TryStar)):
            inner = inner or any(
                handler.type is None or "Error" in ast.dump(handler.type) or "Exception" in ast.dump(handler.type)
                for handler in child.handlers
            )
        elif isinstance(child, (ast.If, ast.IfExp, ast.BoolOp)):
            test = child if isinstance(child, ast.BoolOp) else child.test
            inner = inner or any(
                isinstance(part, ast.Call) and dotted(part.func) in ("hasattr", "getattr") for part in ast.walk(test)
            )
        yield child, inner
        yield from _walk(child, inner)
