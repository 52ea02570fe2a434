"""Builds the fact about a class of a plugin: its bases, its methods, and the inherited attributes that it reads."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from vllm_patchbay.audit.facts import ClassFact, Meanings, MethodInfo, NamedUse, Place
from vllm_patchbay.audit.functions import catch_of
from vllm_patchbay.audit.statement_forms import is_static
from vllm_patchbay.upstream.modules import Binds, children, class_body, dotted, walk

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def class_fact(
    node: ast.ClassDef, bases: tuple[Meanings, ...], package: str, place: Place, place_of: Callable[[ast.AST], Place]
) -> ClassFact:
    """Returns the fact about a class definition; `place_of` returns the place of a node below it."""
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
        self_name = first[0].arg if first and not is_static(definition) else ""
        for inner, guarded in _walk_with_guards(definition):
            if not isinstance(inner, ast.Attribute) or (guarded and isinstance(inner.ctx, ast.Load)):
                continue
            owner = inner.value
            if isinstance(owner, ast.Call) and dotted(owner.func) == "super" and not owner.args:
                supers.append(NamedUse(inner.attr, place_of(inner)))
            elif not isinstance(owner, ast.Name) or owner.id != self_name:
                continue
            elif not isinstance(inner.ctx, ast.Load):
                own.add(inner.attr)
            else:
                first_read = reads.get(inner.attr)
                if first_read is None or inner.lineno < first_read.place.line:
                    reads[inner.attr] = NamedUse(inner.attr, place_of(inner))
    supers.sort(key=lambda use: (use.place.line, use.place.column))
    return ClassFact(place, node.name, bases, tuple(methods), frozenset(own), tuple(supers), tuple(reads.values()))


def _walk_with_guards(function: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yields every node below, and whether hasattr, getattr or an except clause around it guards attribute access."""
    pending = [(child, False) for child in children(function)]
    while pending:
        node, guarded = pending.pop()
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, (ast.Try, ast.TryStar, ast.If, ast.IfExp, ast.BoolOp)):
            guarded = guarded or _guards_attributes(node)
        yield node, guarded
        pending += [(child, guarded) for child in children(node)]


def _guards_attributes(node: ast.Try | ast.TryStar | ast.If | ast.IfExp | ast.BoolOp) -> bool:
    if isinstance(node, (ast.Try, ast.TryStar)):
        return bool(catch_of(node))
    test = node if isinstance(node, ast.BoolOp) else node.test
    return any(isinstance(part, ast.Call) and dotted(part.func) in ("hasattr", "getattr") for part in walk(test))
