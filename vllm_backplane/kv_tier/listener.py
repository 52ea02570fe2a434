"""A worker answers questions of other servers about the blocks that it keeps."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from vllm_backplane.errors import BackplaneError
from vllm_backplane.kv_tier.addresses import Address
from vllm_backplane.kv_tier.outcomes import Outcome
from vllm_backplane.kv_tier.store import BlockStore, Unusable
from vllm_backplane.kv_tier.wire import Kind, Line, Question, Status, WireError

ASKERS = 8
"""At a time; more are told that it is busy, and compute."""
QUESTION_SECONDS = 10.0
ANSWER_SECONDS = 300.0
ACCEPT_REST_SECONDS = 0.5
"""After a connection that could not be had, as where the process has too many files open."""


class Listener:
    def __init__(self, address: Address, identity: bytes, store: BlockStore, tell: Callable[[str], None]) -> None:
        self.identity = identity
        """May be set anew, when weights have changed."""
        self._store = store
        self._tell = tell
        self._places = threading.BoundedSemaphore(ASKERS)
        self._closed = False
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address.host, address.port))
        except OSError as error:
            self._socket.close()
            raise BackplaneError(
                f"the second KV tier cannot listen on {address}: {error}; name another port in 'listen'"
            ) from error
        self._socket.listen(ASKERS)
        threading.Thread(target=self._accept, name="kv-tier-listener", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # or accept() would go on waiting
        finally:
            self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                self._tell(f"the second KV tier could not take a connection: {error}")
                time.sleep(ACCEPT_REST_SECONDS)
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="kv-tier-asker", daemon=True).start()
            else:
                _turn_away(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                question = Line(connection, QUESTION_SECONDS).asked()
                self._answer(Line(connection, ANSWER_SECONDS), question)
        except (OSError, WireError) as error:  # whoever asked is gone, or is none of us
            self._tell(f"a question to the second KV tier was not answered to its end: {error}")
        finally:
            self._places.release()

    def _answer(self, line: Line, question: Question) -> None:
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


def _turn_away(connection: socket.socket) -> None:
    with connection:
        try:
            Line(connection, 1.0).tell_status(Status.BUSY)
        except OSError:  # it has gone by itself
            return
