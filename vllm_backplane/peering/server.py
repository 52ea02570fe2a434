"""A port of the loopback interface on which a worker answers questions, each in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from vllm_backplane.errors import BackplaneError
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import WireError

ASKERS = 8
"""At a time; more are told that it is busy."""
ACCEPT_REST_SECONDS = 0.5
"""After a connection that could not be had, as where the process has too many files open."""


class Answering(ABC):
    def __init__(self, address: Address, what: str, option: str, tell: Callable[[str], None]) -> None:
        """`what` answers, at an address that the user stated by `option`."""
        self._what, self._tell = what, tell
        self._closed = False
        self._places = threading.BoundedSemaphore(ASKERS)
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address.host, address.port))
        except OSError as error:
            self._socket.close()
            raise BackplaneError(
                f"{what} cannot listen on {address}: {error}; name another port in '{option}'"
            ) from error
        self._socket.listen(ASKERS)
        threading.Thread(target=self._accept, name=f"{option}-listener", daemon=True).start()

    @abstractmethod
    def converse(self, connection: socket.socket) -> None:
        """One question and its answer. Raises OSError or WireError where whoever asked is gone, or is none of us."""

    @abstractmethod
    def turn_away(self, connection: socket.socket) -> None:
        """There are too many already."""

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
                self._tell(f"{self._what} could not take a connection: {error}")
                time.sleep(ACCEPT_REST_SECONDS)
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="asker", daemon=True).start()
            else:
                with connection:
                    try:
                        self.turn_away(connection)
                    except OSError:  # it has gone by itself
                        continue

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self.converse(connection)
        except (OSError, WireError) as error:
            self._tell(f"a question to {self._what} was not answered to its end: {error}")
        finally:
            self._places.release()
