"""How a source tree calls methods of given names: which arguments by name, how many by position.

Who the method belongs to is not known, only its name, so this is evidence and not proof.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vllm_patchbay.upstream.source import SourceError, SourceTree
from vllm_patchbay.upstream.symbols import SymbolIndex

_LONGEST_CALL = 4000
MOST_UNRELATED = 8
"""Classes that have a method of a name, not from one another."""


@dataclass(slots=True)
class Calls:
    keywords: set[str] = field(default_factory=set)
    positional: int = 0
    """The most that one call passes."""


def calls_of(tree: SourceTree, methods: Iterable[str]) -> dict[str, Calls]:
    names = sorted(set(methods))
    found = {name: Calls() for name in names}
    if not names:
        return found
    pattern = re.compile(rf"\.({'|'.join(map(re.escape, names))})\(")
    for _, text in _texts(tree):
        for match in pattern.finditer(text):
            call = _call_at(text, match.end() - 1)
            if call is not None:
                calls = found[match[1]]
                calls.keywords |= {keyword.arg for keyword in call.keywords if keyword.arg is not None}
                if not any(isinstance(argument, ast.Starred) for argument in call.args):
                    calls.positional = max(calls.positional, len(call.args))
    return found


def is_common(index: SymbolIndex, tree: SourceTree, method: str) -> bool:
    """Whether so many unrelated classes have a method of the name that a call of it says nothing about one of them."""
    pattern = re.compile(rf"\n[ \t]+(?:async[ \t]+)?def {re.escape(method)}\(")
    defining = [(module, len(pattern.findall(text))) for module, text in _texts(tree)]
    if sum(count for _, count in defining) <= MOST_UNRELATED:
        return False
    origins: set[tuple[str, str]] = set()
    for module, count in defining:
        content = index.module(module) if count else None
        for name, symbols in content.names.items() if content is not None else ():
            if any(symbol.body is not None and method in symbol.body.members for symbol in symbols):
                line = index.ancestors(module, name)
                having = [(m, q) for m, q, body in (line.classes if line else ()) if method in body.members]
                origins.update(having[-1:])
        if len(origins) > MOST_UNRELATED:
            return True
    return False


def _texts(tree: SourceTree) -> Iterator[tuple[str, str]]:
    for module in tree.modules():
        try:
            yield module, tree.read(module) or ""
        except SourceError:
            continue


def _call_at(text: str, opening: int) -> ast.Call | None:
    """The call whose opening parenthesis is at a position."""
    depth = 0
    for position in range(opening, min(len(text), opening + _LONGEST_CALL)):
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
