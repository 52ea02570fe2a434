"""A connection between two KV tiers on which things go wrong: questions pass, and something is done to answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from tests.ports import free_port
from vllm_backplane.kv_tier.addresses import Address
from vllm_backplane.kv_tier.wire import Kind, Line

Treatment = Callable[[bytes], bytes]


def free_address(host: str = "127.0.0.1") -> Address:
    return Address(host, free_port(host))


class Wire:
    """`treat` gets the answer to a question for blocks, status and all; after that the wire says nothing for `hang`
    seconds, or until `cut` is set, and is cut. Questions of which blocks there are go through untouched."""

    def __init__(self, to: Address) -> None:
        self.treat: Treatment = bytes
        self.hang = 0.0
        self.cut = threading.Event()
        """Ends the hanging before its time."""
        self._to = to
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._socket.getsockname())
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def _pass_on(self, connection: socket.socket) -> None:
        try:
            with connection, socket.create_connection((self._to.host, self._to.port)) as far:
                question = Line(connection, 5).asked()
                Line(far, 5).ask(question)
                far.settimeout(60)
                answer = b"".join(iter(lambda: far.recv(1 << 20), b""))
                if question.kind is Kind.HAVE:
                    connection.sendall(answer)
                    return
                connection.sendall(self.treat(answer))
                self.cut.wait(self.hang)
        except OSError:  # one of the two has gone, which is what the other is to notice
            return

    def close(self) -> None:
        self.cut.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
