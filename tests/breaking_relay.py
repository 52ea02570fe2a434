"""Passes connections on to a server, number by number, and does something to the answers of some of them."""

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
    after: int
    """Bytes of the answer that pass before; a shorter answer passes as it is."""
    flip: bool = False
    """Change a bit of what follows, and pass the rest on; otherwise the connection ends."""
    hang: float = 0.0
    """Seconds without a word before that, unless the relay is told to `cut`."""
    then: Callable[[], None] = field(default=nothing)
    """Called at that moment."""


class Relay:
    def __init__(self, to: Address, fault: Fault | None = None) -> None:
        self.faults: Mapping[int, Fault] = {}
        """By the number of the connection, from 0."""
        self.fault = fault
        """Of every other connection."""
        self.connections = 0
        self.cut = threading.Event()
        """Ends all hanging before its time."""
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
            threading.Thread(target=self._pass_on, args=(connection, fault), daemon=True).start()

    def _pass_on(self, near: socket.socket, fault: Fault | None) -> None:
        try:
            with near, socket.create_connection((self._to.host, self._to.port)) as far:
                far.sendall(near.recv(1 << 16))  # a question is one small piece
                passed = 0
                while data := far.recv(1 << 20):
                    if fault is not None and passed + len(data) > fault.after:
                        place = fault.after - passed
                        near.sendall(data[:place])
                        fault.then()
                        self.cut.wait(fault.hang)
                        if not fault.flip:
                            return
                        data, fault = bytes([data[place] ^ 4]) + data[place + 1 :], None
                    near.sendall(data)
                    passed += len(data)
        except OSError:  # one of the two has gone, which is what the other is to notice
            return

    def close(self) -> None:
        self.cut.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
