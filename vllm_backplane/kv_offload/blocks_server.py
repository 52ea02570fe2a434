"""Serves the offloaded blocks of a worker to other servers of the host."""

from __future__ import annotations

import socket
from collections.abc import Callable

from vllm_backplane.kv_offload.blocks_protocol import BlockConnection, Kind, Request, Status
from vllm_backplane.kv_offload.store import BlockStore, BlockUnavailable, Outcome
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.server import LoopbackServer

REQUEST_SECONDS = 10.0
"""Seconds in which a request must have been received."""
RESPONSE_SECONDS = 300.0
"""Seconds in which a response must have been sent."""


class BlockServer(LoopbackServer):
    def __init__(self, address: Address, identity: bytes, store: BlockStore, warn: Callable[[str], None]) -> None:
        self.identity = identity
        """Identity of the model. Empty while weights are being replaced, and set again before the first block of the
        new weights is stored."""
        self._store = store
        super().__init__(address, "KV offload", "listen", warn)

    def handle(self, sock: socket.socket) -> None:
        request = BlockConnection(sock, REQUEST_SECONDS).receive_request()
        self._respond(BlockConnection(sock, RESPONSE_SECONDS), request)

    def reject(self, sock: socket.socket) -> None:
        BlockConnection(sock, 1.0).send_status(Status.BUSY)

    def _respond(self, connection: BlockConnection, request: Request) -> None:
        if request.identity != self.identity:
            connection.send_status(Status.OTHER_MODEL)
            return
        connection.send_status(Status.OK)
        if request.kind is Kind.HAVE:
            connection.send_count(self._store.count_stored(request.keys))
            return
        for key in request.keys:
            try:
                checksum, row = self._store.read_copy(key)
            except BlockUnavailable as fault:
                if fault.outcome is not Outcome.MISSING:
                    self._warn(f"KV offload does not send a block to another server: {fault}")
                connection.send_no_block()
            else:
                if request.identity == self.identity:
                    connection.send_block(checksum, row)
                else:  # the weights have been replaced since the request arrived
                    connection.send_no_block()
