"""Records, for each block of the KV cache, the earliest step on which its content depends.

New weights take effect between two steps. A block whose content depends on an earlier step must not be saved
afterwards. Requests may find such blocks, because vLLM leaves it to the caller to reset its own prefix cache, and
requests in flight have computed some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

UNKNOWN = 0
"""The origin of content of which no step is known. It is before every step."""


class BlockOrigins:
    """Maps blocks of the KV cache, and requests in flight, to the number of the earliest step they depend on."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._of_block: dict[int, int] = {}
        self._of_request: dict[str, int] = {}

    def load(self, block_ids: Iterable[int], step: int) -> None:
        """Records that `step` begins to load these blocks from the store or from the peer."""
        self._of_block.update(dict.fromkeys(block_ids, step))

    def begin(self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int, step: int) -> int:
        """Records that a request begins in `step`, with `num_computed_tokens` in its first blocks. Returns its origin:
        the earliest origin of these blocks. All blocks that the request computes have the same origin."""
        found, partial = divmod(num_computed_tokens, self._block_size)
        # vLLM copies a block that is found in part, and does not report from which one.
        origins = [UNKNOWN] if partial else [self._of_block.get(block, UNKNOWN) for block in block_ids[:found]]
        self._of_request[request_id] = min(origins, default=step)
        self.extend(request_id, block_ids[found:])
        return self._of_request[request_id]

    def extend(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Records that a request computes further blocks."""
        self._of_block.update(dict.fromkeys(block_ids, self.of_request(request_id)))

    def of_request(self, request_id: str) -> int:
        return self._of_request.get(request_id, UNKNOWN)

    def end(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)
