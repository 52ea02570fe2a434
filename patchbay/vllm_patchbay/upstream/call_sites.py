"""Collects how a source tree calls methods of given names: which arguments by name, and how many by position.

A call site shows the name of the method and not the class that it belongs to. The result is therefore evidence about
the callers of a method, and no proof.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_patchbay.upstream.source import SourceTree, module_texts
from vllm_patchbay.upstream.symbols import SymbolIndex

_MAX_CALL_LENGTH = 4000
MAX_UNRELATED_CLASSES = 8
"""Number of unrelated classes with a method of one name up to which a call of that name is evidence."""


@dataclass(slots=True)
class Calls:
    """Summarizes the arguments that all calls of one method name pass."""

    keywords: set[str] = field(default_factory=set)
    positional: int = 0
    """Largest number of positional arguments in one call."""


def calls_of(tree: SourceTree, methods: Iterable[str]) -> dict[str, Calls]:
    """Returns the calls of each method name in the whole tree."""
    names = sorted(set(methods))
    found = {name: Calls() for name in names}
    if not names:
        return found
    pattern = re.compile(rf"\.({'|'.join(map(re.escape, names))})\(")
    for _, text in module_texts(tree):
        for match in pattern.finditer(text):
            call = _call_at(text, match.end() - 1)
            if call is not None:
                calls = found[match[1]]
                calls.keywords |= {keyword.arg for keyword in call.keywords if keyword.arg is not None}
                if not any(isinstance(argument, ast.Starred) for argument in call.args):
                    calls.positional = max(calls.positional, len(call.args))
    return found


def is_common_method_name(index: SymbolIndex, tree: SourceTree, method: str) -> bool:
    """Returns whether so many unrelated classes define the method that a call of its name is no evidence about one of
    them."""
    pattern = re.compile(rf"\n[ \t]+(?:async[ \t]+)?def {re.escape(method)}\(")
    defining = [(module, len(pattern.findall(text))) for module, text in module_texts(tree)]
    if sum(count for _, count in defining) <= MAX_UNRELATED_CLASSES:
        return False
    origins: set[tuple[str, str]] = set()
    for module, count in defining:
        content = index.module(module) if count else None
        for name, symbols in content.names.items() if content is not None else ():
            if any(symbol.body is not None and method in symbol.body.members for symbol in symbols):
                ancestors = index.ancestors(module, name)
                having = [(m, q) for m, q, body in (ancestors.classes if ancestors else ()) if method in body.members]
                origins.update(having[-1:])
        if len(origins) > MAX_UNRELATED_CLASSES:
            return True
    return False


def _call_at(text: str, opening: int) -> ast.Call | None:
    """Returns the call whose opening parenthesis is at a position, or None if it cannot be parsed."""
    depth = 0
    for position in range(opening, min(len(text), opening + _MAX_CALL_LENGTH)):
        character = text[position]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                try:
                    parsed = ast.parse(f"_{text[opening : position + 1]}", mode="eval").body
                except (SyntaxError, ValueError):
                    return None
                return parsed if isinstance(parsed, ast.Call) else None
    return None
