"""Reduces the source of a function to the statements that mention given names.

A guard of a long function, such as a constructor, depends on a few of its statements. The others may change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from vllm_patchbay.errors import PatchError

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements_with(names: Sequence[str], source: str) -> str:
    """Returns the source of a function without the statements that mention none of the names.

    A name is an identifier or a dotted path, such as ``torch.cuda``. The function's signature stays, and so do the
    conditions and loops around a statement. Annotations of variables are left out, because no function evaluates them.
    Raises PatchError for anything but a function.
    """
    tree = ast.parse(source)
    [function] = tree.body
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise PatchError(f"'mentions' is for functions, and this is none: {source.splitlines()[0]}")
    _reduce(function, [tuple(name.split(".")) for name in names])
    return ast.unparse(tree)


def _reduced_block(block: Sequence[ast.AST], wanted: Sequence[tuple[str, ...]]) -> list[ast.AST]:
    return [plain for each in block if _reduce(plain := _without_annotation(each), wanted)]


def _without_annotation(node: ast.AST) -> ast.AST:
    if not isinstance(node, ast.AnnAssign):
        return node
    return ast.Pass() if node.value is None else ast.copy_location(ast.Assign([node.target], node.value), node)


def _reduce(node: ast.AST, wanted: Sequence[tuple[str, ...]]) -> bool:
    """Removes what mentions no name from the blocks of a statement, handler or case. Returns whether a name is
    mentioned in it."""
    blocks: dict[str, list[ast.AST]] = {name: found for name in _BLOCKS if (found := getattr(node, name, None))}
    for name in blocks:
        setattr(node, name, [])
    has_mention = any(_contains(path, name) for path in _paths(node) for name in wanted)
    for name, block in blocks.items():
        kept = _reduced_block(block, wanted)
        has_mention = has_mention or bool(kept)
        if name in ("handlers", "cases"):
            kept = block  # a statement without them would be no valid source
        elif name in ("body", "finalbody"):
            kept = kept or [ast.Pass()]
        setattr(node, name, kept)
    return has_mention


def _paths(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yields the dotted paths in an expression or statement, and its texts, which may name an attribute."""
    for each in ast.walk(node):
        if isinstance(each, (ast.Attribute, ast.Name)):
            yield _path(each)
        elif isinstance(each, ast.alias):
            yield tuple(each.name.split("."))
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield (each.value,)


def _path(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Attribute):
        return (*_path(node.value), node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ()


def _contains(path: tuple[str, ...], name: tuple[str, ...]) -> bool:
    return any(path[start : start + len(name)] == name for start in range(len(path)))
