"""Asks another server for blocks. Whatever goes wrong, the block is computed instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy

from vllm_backplane.kv_offload.peer_protocol import MOST_KEYS, BlockLine, Kind, Question, Status
from vllm_backplane.kv_offload.slots import Bytes
from vllm_backplane.kv_offload.store import Outcome, Unusable, checksum
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import WireError, connected

REST_SECONDS = 5.0
"""For which a peer that failed is not asked again."""
BYTES_PER_SECOND = 16 << 20
"""A peer that is slower than this would better be left alone."""
MEANINGS = {
    Status.OTHER_MODEL: "it serves another model, or the same in another way; start both with the same options",
    Status.BUSY: "it has too many to answer",
}


class Peer:
    def __init__(self, address: Address, seconds: float, tell: Callable[[str], None]) -> None:
        self._address, self._seconds, self._tell = address, seconds, tell
        self._rests_until = 0.0
        self.identity = b""

    def rest(self) -> None:
        self._rests_until = time.monotonic() + REST_SECONDS

    def held(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys it has; none if it does not say."""
        if not keys or time.monotonic() < self._rests_until:
            return 0
        try:
            with self._asked(Kind.HAVE, keys[:MOST_KEYS]) as line:
                return min(line.count(), len(keys))
        except (OSError, WireError) as error:
            self.rest()
            self._tell(f"{self._address} is not asked for blocks for {REST_SECONDS:.0f} s: {error}")
            return 0

    def blocks(self, keys: Sequence[bytes], size: int) -> Iterator[Bytes | Unusable]:
        """For each key the block, or why it cannot be had."""
        done = 0
        try:
            with self._asked(Kind.GET, keys) as line:
                for key in keys:
                    row = numpy.empty(size, numpy.uint8)
                    # Between two blocks the worker may have taken a step.
                    line.renew(self._seconds + size / BYTES_PER_SECOND)
                    given = line.block_into(row)
                    done += 1
                    if given is None:
                        yield Unusable(Outcome.MISSING, f"{self._address} does not have it any more")
                    elif checksum(key, row) != given:
                        yield Unusable(Outcome.DAMAGED, f"what {self._address} sent is not what it kept")
                    else:
                        yield row
        except (OSError, WireError) as error:
            for _ in keys[done:]:
                yield Unusable(Outcome.UNREACHABLE, f"{self._address}: {error}")

    @contextmanager
    def _asked(self, kind: Kind, keys: Sequence[bytes]) -> Iterator[BlockLine]:
        with connected(self._address, self._seconds) as connection:
            line = BlockLine(connection, self._seconds)
            line.ask(Question(kind, self.identity, list(keys)))
            status = line.status(Status)
            if status is not Status.OK:
                raise WireError(MEANINGS[status])
            yield line
