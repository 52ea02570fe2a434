"""How a source tree calls methods of given names: which arguments by name, how many by position.

Who the method belongs to is not known, only its name, so this is evidence and not proof.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_backplane.upstream.source import SourceError, SourceTree

_LONGEST_CALL = 4000


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
    for module in tree.modules():
        try:
            text = tree.read(module) or ""
        except SourceError:
            continue
        for match in pattern.finditer(text):
            call = _call_at(text, match.end() - 1)
            if call is not None:
                calls = found[match[1]]
                calls.keywords |= {keyword.arg for keyword in call.keywords if keyword.arg is not None}
                if not any(isinstance(argument, ast.Starred) for argument in call.args):
                    calls.positional = max(calls.positional, len(call.args))
    return found


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
