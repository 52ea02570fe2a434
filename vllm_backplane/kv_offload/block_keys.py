"""Computes the keys of KV cache blocks from their tokens.

vLLM's own block hashes start from a number that each process draws at random, so they mean nothing to another server.
These keys depend only on the tokens and the request's cache salt. Each key covers all tokens up to the end of its
block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 32


class KeyChain:
    """Computes the keys of the full blocks of one sequence, each once and from the key of the block before it."""

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        suffix = "" if salt is None else f"salt {salt}"
        self._root = hashlib.blake2b(f"{block_size} {suffix}".encode(), digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def up_to(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Returns the keys of the first `count` blocks of `tokens`. Since the last call, tokens may have been appended,
        but not changed."""
        size = self._block_size
        while len(self._keys) < count:
            start = len(self._keys) * size
            block = array("q", tokens[start : start + size])
            if len(block) != size:
                raise ValueError(f"block {len(self._keys)} is not full: {len(block)} of {size} tokens")
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(hashlib.blake2b(parent + block.tobytes(), digest_size=KEY_BYTES).digest())
        return self._keys[:count]
