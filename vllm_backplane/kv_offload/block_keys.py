"""Names of blocks: what tokens they hold, and after which.

vLLM's own block hashes begin with a number that each process draws afresh, so two servers would not understand each
other. These depend on tokens and salt alone. A name stands for all tokens up to the end of its block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 32


class KeyChain:
    """The keys of one sequence's full blocks, computed as far as they were asked for."""

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        begin = "" if salt is None else f"salt {salt}"
        self._root = hashlib.blake2b(f"{block_size} {begin}".encode(), digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def up_to(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Keys of the first `count` blocks of `tokens`, which may have grown since the last call and not changed."""
        size = self._block_size
        while len(self._keys) < count:
            place = len(self._keys) * size
            within = array("q", tokens[place : place + size])
            if len(within) != size:
                raise ValueError(f"block {len(self._keys)} is not full: {len(within)} of {size} tokens")
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(hashlib.blake2b(parent + within.tobytes(), digest_size=KEY_BYTES).digest())
        return self._keys[:count]
