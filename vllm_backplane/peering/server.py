"""Serves requests of other processes on a loopback port: one connection per request, one thread per connection."""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from vllm_backplane.errors import BackplaneError
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import WireError

MAX_CONNECTIONS = 8
"""Connections that are served at a time. Further ones are rejected as busy."""
ACCEPT_RETRY_SECONDS = 0.5
"""Pause after accept() failed, for example because the process has too many open files."""


class LoopbackServer(ABC):
    """Accepts connections in a daemon thread. Subclasses implement the protocol."""

    def __init__(self, address: Address, service: str, option: str, warn: Callable[[str], None]) -> None:
        """Binds and listens at once. `service` names the server in messages; `option` is the user's option that holds
        the address."""
        self._service, self._warn = service, warn
        self._closed = False
        self._free_places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address.host, address.port))
        except OSError as error:
            self._socket.close()
            raise BackplaneError(
                f"{service} cannot listen on {address}: {error}; name another port in '{option}'"
            ) from error
        self._socket.listen(MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name=f"{option}-listener", daemon=True).start()

    @abstractmethod
    def handle(self, sock: socket.socket) -> None:
        """Reads one request and sends the response. Raises OSError or WireError if the client is gone or violates
        the protocol."""

    @abstractmethod
    def reject(self, sock: socket.socket) -> None:
        """Sends the response that the server is busy."""

    def close(self) -> None:
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # otherwise accept() would keep waiting
        finally:
            self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                self._warn(f"{self._service} could not accept a connection: {error}")
                time.sleep(ACCEPT_RETRY_SECONDS)
                continue
            if self._free_places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="peer-request", daemon=True).start()
            else:
                with sock:
                    try:
                        self.reject(sock)
                    except OSError:  # the client has closed the connection already
                        continue

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                self.handle(sock)
        except (OSError, WireError) as error:
            self._warn(f"a request to {self._service} was not completed: {error}")
        finally:
            self._free_places.release()
