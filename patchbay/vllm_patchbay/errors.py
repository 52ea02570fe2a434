"""Defines the errors that a user can act on. Each message states what is wrong and names the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_LENGTH = 100
"""Longer words get no suggestion: the comparison takes time and memory in proportion to their length."""


class PatchbayError(RuntimeError):
    """Reports that an input cannot be used; the message names the remedy."""


class PatchError(PatchbayError):
    """Reports that a patch is declared wrongly, or does not fit the vLLM that it is meant for."""


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown word: ``; did you mean 'device'?``, or a full stop."""
    if len(word) > _MAX_LENGTH:
        return "."
    match = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else "."
