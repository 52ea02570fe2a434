"""Reduces the source of a function to the statements that mention given names.

A guard of a long function, such as a constructor, depends on a few of its statements. The others may change.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from vllm_patchbay.errors import PatchError

_NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements_with(names: Sequence[str], source: str) -> str:
    """Returns the source of a function without the statements that mention none of the names.

    A name is an identifier or a dotted path, such as ``torch.cuda``. The conditions and loops around a statement stay,
    and what depends on a condition that mentions a name. The function's signature is left out, and so are annotations
    of variables, because no function evaluates them. Raises PatchError for anything but a function.
    """
    tree = ast.parse(source)
    [function] = tree.body
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise PatchError(f"'mentions' is for functions, and this is none: {source.splitlines()[0]}")
    function.body = _reduced_block(function.body, [tuple(name.split(".")) for name in names]) or [ast.Pass()]
    function.args, function.decorator_list, function.returns = _NO_ARGUMENTS, [], None
    return ast.unparse(tree)


def _reduced_block(block: Sequence[ast.AST], wanted: Sequence[tuple[str, ...]]) -> list[Any]:
    return [plain for each in block if _reduce(plain := _without_annotation(each), wanted)]


def _without_annotation(node: ast.AST) -> ast.AST:
    if not isinstance(node, ast.AnnAssign):
        return node
    return ast.Pass() if node.value is None else ast.copy_location(ast.Assign([node.target], node.value), node)


def _reduce(node: ast.AST, wanted: Sequence[tuple[str, ...]]) -> bool:
    """Removes what mentions no name from the blocks of a statement, handler or case, unless its head mentions one.
    Returns whether a name is mentioned in it."""
    blocks: dict[str, list[ast.AST]] = {name: found for name in _BLOCKS if (found := getattr(node, name, None))}
    inner = {each for block in blocks.values() for each in block}
    if any(_contains(path, name) for path in _paths(node, inner) for name in wanted):
        return True
    has_mention = False
    for name, block in blocks.items():
        kept = _reduced_block(block, wanted)
        has_mention = has_mention or bool(kept)
        if name in ("handlers", "cases"):
            kept = block  # a statement without them would be no valid source
        elif name in ("body", "finalbody"):
            kept = kept or [ast.Pass()]
        setattr(node, name, kept)
    return has_mention


def _paths(node: ast.AST, without: Collection[ast.AST] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the dotted paths in a statement or expression, and its texts, which may name an attribute."""
    if isinstance(node, (ast.Attribute, ast.Name)):
        yield _path(node)
    elif isinstance(node, ast.alias):
        yield tuple(node.name.split("."))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield (node.value,)
    for each in ast.iter_child_nodes(node):
        if each not in without:
            yield from _paths(each)


def _path(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Attribute):
        return (*_path(node.value), node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ()


def _contains(path: tuple[str, ...], name: tuple[str, ...]) -> bool:
    return any(path[start : start + len(name)] == name for start in range(len(path)))
