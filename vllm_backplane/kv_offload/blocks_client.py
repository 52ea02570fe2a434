"""Requests KV cache blocks from another server. If a request fails for any reason, the blocks are computed instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy

from vllm_backplane.kv_offload.blocks_protocol import MAX_KEYS, BlockConnection, Kind, Request, Status
from vllm_backplane.kv_offload.slots import Bytes
from vllm_backplane.kv_offload.store import BlockUnavailable, Outcome, checksum
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import MIN_BYTES_PER_SECOND, WireError, connect

BACKOFF_SECONDS = 5.0
"""Seconds after a failure in which the peer gets no requests."""
_REASONS = {
    Status.OTHER_MODEL: "it serves another model or other weights, or runs with other options; start both servers with "
    "the same model and options",
    Status.BUSY: "it is busy with other requests",
}


class BlockClient:
    """Requests the blocks of one worker of the peer. `identity` is sent with every request. While it is empty, because
    the model's weights are being replaced, nothing is requested."""

    def __init__(self, address: Address, seconds: float, warn: Callable[[str], None]) -> None:
        self._address, self._seconds, self._warn = address, seconds, warn
        self._backoff_until = 0.0
        self.identity = b""

    def back_off(self) -> None:
        """Makes `count_stored` return 0 without a request for the next `BACKOFF_SECONDS`."""
        self._backoff_until = time.monotonic() + BACKOFF_SECONDS

    def count_stored(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the first keys the peer has; 0 if it does not respond."""
        if not keys or not self.identity or time.monotonic() < self._backoff_until:
            return 0
        try:
            with self._request(Kind.HAVE, keys[:MAX_KEYS]) as connection:
                return min(connection.receive_count(), len(keys))
        except (OSError, WireError) as error:
            self.back_off()
            self._warn(f"{self._address} gets no requests for KV blocks for {BACKOFF_SECONDS:.0f} s: {error}")
            return 0

    def fetch(self, keys: Sequence[bytes], size: int) -> Iterator[Bytes | BlockUnavailable]:
        """Yields for each key the block, or why it is not available."""
        done = 0
        try:
            if not self.identity:
                raise WireError("it gets no requests while the weights of this server are being replaced")
            with self._request(Kind.GET, keys) as connection:
                for key in keys:
                    row = numpy.empty(size, numpy.uint8)
                    # The worker may have run a step since the last block.
                    connection.reset_deadline(self._seconds + size / MIN_BYTES_PER_SECOND)
                    expected = connection.receive_block_into(row)
                    done += 1
                    if expected is None:
                        yield BlockUnavailable(Outcome.MISSING, f"{self._address} no longer has it")
                    elif checksum(key, row) != expected:
                        yield BlockUnavailable(
                            Outcome.DAMAGED, f"the bytes received from {self._address} do not match their checksum"
                        )
                    else:
                        yield row
        except (OSError, WireError) as error:
            for _ in keys[done:]:
                yield BlockUnavailable(Outcome.UNREACHABLE, f"{self._address}: {error}")

    @contextmanager
    def _request(self, kind: Kind, keys: Sequence[bytes]) -> Iterator[BlockConnection]:
        """Sends a request, and yields the connection after the status. Raises unless the status is OK."""
        with connect(self._address, self._seconds) as sock:
            connection = BlockConnection(sock, self._seconds)
            connection.send_request(Request(kind, self.identity, list(keys)))
            status = connection.receive_status(Status)
            if status is not Status.OK:
                raise WireError(_REASONS[status])
            yield connection
