"""A worker answers questions of other servers about the blocks that it keeps."""

from __future__ import annotations

import socket
from collections.abc import Callable

from vllm_backplane.kv_offload.peer_protocol import BlockLine, Kind, Question, Status
from vllm_backplane.kv_offload.store import BlockStore, Outcome, Unusable
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.server import Answering

QUESTION_SECONDS = 10.0
ANSWER_SECONDS = 300.0


class Listener(Answering):
    def __init__(self, address: Address, identity: bytes, store: BlockStore, tell: Callable[[str], None]) -> None:
        self.identity = identity
        """May be set anew, when weights have changed."""
        self._store = store
        super().__init__(address, "the second KV tier", "listen", tell)

    def converse(self, connection: socket.socket) -> None:
        question = BlockLine(connection, QUESTION_SECONDS).asked()
        self._answer(BlockLine(connection, ANSWER_SECONDS), question)

    def turn_away(self, connection: socket.socket) -> None:
        BlockLine(connection, 1.0).tell_status(Status.BUSY)

    def _answer(self, line: BlockLine, question: Question) -> None:
        if question.identity != self.identity:
            line.tell_status(Status.OTHER_MODEL)
            return
        line.tell_status(Status.OK)
        if question.kind is Kind.HAVE:
            line.tell_count(self._store.first_held(question.keys))
            return
        for key in question.keys:
            try:
                checksum, row = self._store.copy(key)
            except Unusable as fault:
                if fault.outcome is not Outcome.MISSING:
                    self._tell(f"a block of the second KV tier is not given away: {fault}")
                line.tell_no_block()
            else:
                line.tell_block(checksum, row)
