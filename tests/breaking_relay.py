"""Relays connections to a server, and injects faults into the responses of chosen connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_backplane.peering.addresses import Address


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """Describes a fault in a response. A response that is too short for it passes unchanged."""

    after: int
    """Bytes of the response that pass before the fault."""
    flip: bool = False
    """Whether one bit is changed and the rest passes; otherwise the connection is closed."""
    hang: float = 0.0
    """Seconds without data before the fault, unless `Relay.cut` is set."""
    then: Callable[[], None] = field(default=nothing)
    """Called before the pause."""


class Relay:
    """Listens on a loopback port, and connects each client to the server."""

    def __init__(self, to: Address, fault: Fault | None = None) -> None:
        self.faults: Mapping[int, Fault] = {}
        """Faults by number of the connection, from 0."""
        self.fault = fault
        """Fault of every other connection."""
        self.connections = 0
        self.cut = threading.Event()
        """Ends all pauses early when it is set."""
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
            fault = self.faults.get(self.connections, self.fault)
            self.connections += 1
            threading.Thread(target=self._relay, args=(connection, fault), daemon=True).start()

    def _relay(self, client: socket.socket, fault: Fault | None) -> None:
        try:
            with client, socket.create_connection((self._to.host, self._to.port)) as server:
                server.sendall(client.recv(1 << 16))  # a request is one small piece
                passed = 0
                while data := server.recv(1 << 20):
                    if fault is not None and passed + len(data) > fault.after:
                        place = fault.after - passed
                        client.sendall(data[:place])
                        fault.then()
                        self.cut.wait(fault.hang)
                        if not fault.flip:
                            return
                        data, fault = bytes([data[place] ^ 4]) + data[place + 1 :], None
                    client.sendall(data)
                    passed += len(data)
        except OSError:  # one side has closed; closing the other connection too makes the other side see it
            return

    def close(self) -> None:
        self.cut.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
