"""Passes connections on to a server, number by number, and does something to the answer of one of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_backplane.kv_tier.addresses import Address


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Fault:
    after: int
    """Bytes of the answer that pass before."""
    flip: bool = False
    """Change a bit of what follows, and pass the rest on; otherwise the connection ends."""
    hang: float = 0.0
    """Seconds without a word before that."""
    then: Callable[[], None] = field(default=nothing)
    """Called at that moment."""


class Relay:
    def __init__(self, to: Address, faults: Mapping[int, Fault] | None = None) -> None:
        self.faults = dict(faults or {})
        """By the number of the connection, from 0."""
        self.connections = 0
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
            number, self.connections = self.connections, self.connections + 1
            threading.Thread(target=self._pass_on, args=(connection, self.faults.get(number)), daemon=True).start()

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
                        time.sleep(fault.hang)
                        if not fault.flip:
                            return
                        data, fault = bytes([data[place] ^ 4]) + data[place + 1 :], None
                    near.sendall(data)
                    passed += len(data)
        except OSError:  # one of the two has gone, which is what the other is to notice
            return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
