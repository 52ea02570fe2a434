"""A class of a plugin as a fact: its bases, its methods, and what it asks of what it inherits from."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from vllm_patchbay.audit.facts import ClassFact, Meanings, MethodInfo, NamedUse, Place
from vllm_patchbay.audit.functions import catch_of
from vllm_patchbay.upstream.modules import Binds, children, class_body, dotted, walk

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def class_fact(
    node: ast.ClassDef, bases: tuple[Meanings, ...], package: str, place: Place, place_of: Callable[[ast.AST], Place]
) -> ClassFact:
    body = class_body(node, package, instances=False)
    definitions = {statement.name: statement for statement in node.body if isinstance(statement, _FUNCTION)}
    methods = []
    for name, symbols in body.members.items():
        symbol = symbols[-1]
        definition = definitions.get(name)
        if symbol.binds in (Binds.FUNCTION, Binds.PROPERTY) and definition is not None:
            marks = {dotted(decorator).rpartition(".")[2] for decorator in definition.decorator_list}
            methods.append(MethodInfo(symbol, definition.lineno, definition.col_offset + 1, "override" in marks))
    own = set(body.members)
    supers: list[NamedUse] = []
    reads: dict[str, NamedUse] = {}
    for definition in definitions.values() if any(bases) else ():
        first = [*definition.args.posonlyargs, *definition.args.args]
        is_static = any(dotted(decorator) == "staticmethod" for decorator in definition.decorator_list)
        me = first[0].arg if first and not is_static else ""
        for inner, guarded in _walk(definition):
            if not isinstance(inner, ast.Attribute) or (guarded and isinstance(inner.ctx, ast.Load)):
                continue
            owner = inner.value
            if isinstance(owner, ast.Call) and dotted(owner.func) == "super" and not owner.args:
                supers.append(NamedUse(inner.attr, place_of(inner)))
            elif not isinstance(owner, ast.Name) or owner.id != me:
                continue
            elif not isinstance(inner.ctx, ast.Load):
                own.add(inner.attr)
            else:
                first_read = reads.get(inner.attr)
                if first_read is None or inner.lineno < first_read.place.line:
                    reads[inner.attr] = NamedUse(inner.attr, place_of(inner))
    supers.sort(key=lambda use: (use.place.line, use.place.column))
    return ClassFact(place, node.name, bases, tuple(methods), frozenset(own), tuple(supers), tuple(reads.values()))


def _walk(function: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, and whether something around it provides for its failing: hasattr, or except AttributeError."""
    pending = [(child, False) for child in children(function)]
    while pending:
        node, guarded = pending.pop()
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, (ast.Try, ast.TryStar, ast.If, ast.IfExp, ast.BoolOp)):
            guarded = guarded or _provides(node)
        yield node, guarded
        pending += [(child, guarded) for child in children(node)]


def _provides(node: ast.Try | ast.TryStar | ast.If | ast.IfExp | ast.BoolOp) -> bool:
    if isinstance(node, (ast.Try, ast.TryStar)):
        return bool(catch_of(node))
    test = node if isinstance(node, ast.BoolOp) else node.test
    return any(isinstance(part, ast.Call) and dotted(part.func) in ("hasattr", "getattr") for part in walk(test))
