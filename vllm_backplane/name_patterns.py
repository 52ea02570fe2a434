"""Bounds the work of matching the names of layers with a regular expression from an untrusted file.

Python's and vLLM's matchers backtrack: they try the ways in which a pattern can match one after another. The number of
ways is at most a product: each repetition can end at every character of the name, each option doubles the ways, and
each group multiplies them by its alternatives. A pattern is counted and not run.
"""

from __future__ import annotations

import math
import re

LONGEST = 1000
"""Characters that a pattern may have."""
_MANY = 1 << 200

_TOKEN = re.compile(
    r"(?P<open>\((?:\?(?:[:=!]|<[=!]))?)|(?P<close>\))|(?P<or>\|)|(?P<range>\{\d*,?\d*\})|(?P<repeat>[*+])|(?P<option>\?)"
    r"|(?P<atom>\[\^?\]?(?:[^\]\\]|\\.)*\]|\\[^1-9]|[^\\\[\](){}|*+?])",
    re.DOTALL,
)


class UnboundedPattern(ValueError):
    """Reports why the work of matching a pattern cannot be bounded."""


def ways(pattern: str, length: int) -> float:
    """Returns a bound of the ways in which `pattern` can match a name with `length` characters.

    Raises `UnboundedPattern` for repeated groups, references to groups, and what is no regular expression.
    """
    if len(pattern) > LONGEST:
        raise UnboundedPattern(f"it has more than {LONGEST} characters")
    repetitions, factor, alternatives = 0, 1.0, [1]
    at, before = 0, "open"
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or token.lastgroup is None:
            raise UnboundedPattern(f"{pattern[at : at + 10]!r} is not supported")
        kind = token.lastgroup
        if kind == "open":
            alternatives.append(1)
        elif kind == "or":
            alternatives[-1] += 1
        elif kind == "close":
            if len(alternatives) == 1:
                raise UnboundedPattern("a group is closed that was not opened")
            factor *= alternatives.pop()
        elif kind in ("repeat", "range", "option"):
            if kind != "option" and before == "close":
                raise UnboundedPattern("it repeats a group")
            if kind == "option":
                factor *= 1 if before in ("repeat", "range") else 2  # after a repetition, it only changes the order
            elif kind == "repeat":
                repetitions += 1
            else:
                factor *= _width(token[0], length)
        before, at = kind, token.end()
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as fault:
        raise UnboundedPattern(str(fault)) from None
    # Repetitions share the name, so their ends are in order.
    ends = math.comb(length + repetitions, repetitions)
    return factor * math.prod(alternatives) * ends if ends < _MANY else math.inf


def _width(text: str, length: int) -> int:
    """Returns how many numbers of repetitions a range such as {2,5} allows."""
    least, comma, most = text[1:-1].partition(",")
    if not comma:
        return 1
    return max(min(int(most or length), length) - int(least or 0) + 1, 1)
