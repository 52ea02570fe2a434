"""Normalizes and fingerprints source, so that comments, docstrings, layout and quoting make no difference.

A fingerprint is taken from the syntax tree in a form of Patchbay's own: neither ``ast.unparse`` nor ``ast.dump`` gives
the same text under every version of Python, and a fingerprint is compared years after it was recorded.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator

_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores", "lineno", "col_offset", "end_lineno"})
_DIGITS = 16


def normalized_source(source: str) -> str:
    """Returns the source of one or more statements without comments and docstrings, laid out by ``ast.unparse``."""
    return ast.unparse(_parse(source))


def fingerprint(source: str) -> str:
    """Returns a digest of 16 hexadecimal digits, which is equal for `source` and ``normalized_source(source)``."""
    text = "".join(_canonical(_parse(source)))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def _parse(source: str) -> ast.Module:
    """Returns the syntax tree of some statements, indented or not, without docstrings."""
    if source[:1] in (" ", "\t"):
        # A method, cut out of its class. Removing the indentation would change strings that span lines.
        wrapped = ast.parse(f"if 1:\n{source}").body[0]
        assert isinstance(wrapped, ast.If)
        tree = ast.Module(wrapped.body, [])
    else:
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _canonical(node: object) -> Iterator[str]:
    """Yields the parts of a text that stands for a syntax tree and is the same under every version of Python."""
    if isinstance(node, ast.JoinedStr):
        yield "(f"
        yield from _joined(node.values)
        yield ")"
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            # Fields that a newer Python added are empty for source that an older Python can parse.
            if name not in _IGNORED and value is not None and value != []:
                yield f" {name}="
                yield from _canonical(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for element in node:
            yield from _canonical(element)
            yield ","
        yield "]"
    else:
        yield f"{type(node).__name__}:{node!r}"


def _joined(values: list[ast.expr]) -> Iterator[str]:
    """Yields the parts of an f-string, with adjacent literal parts joined and empty ones left out: versions of Python
    differ in how they split them."""
    literal = ""
    for value in values:
        if isinstance(value, ast.Constant):
            literal += str(value.value)
            continue
        if literal:
            yield f" {literal!r}"
            literal = ""
        yield " "
        yield from _canonical(value)
    if literal:
        yield f" {literal!r}"
