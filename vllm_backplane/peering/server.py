"""Serves requests of other processes on a loopback port: one connection per request, one thread per connection.

Every local program can connect. A few clients that send nothing, or do not read what they get, must not keep the others
out: when all places are taken and another client waits, the server disconnects the slowest one.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from vllm_backplane.errors import BackplaneError
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import WireError

MAX_CONNECTIONS = 8
"""Connections that are served at a time. Further ones wait for a place."""
MAX_WAITING = 64
"""Connections that wait for a place at a time. Further ones are rejected as busy."""
WAIT_SECONDS = 4.0
"""Seconds for which a connection waits for a place before it is rejected as busy. Clients of KV offload wait for five
seconds by default, and should learn the reason."""
SLOW_BYTES_PER_SECOND = 1 << 20
"""A client that transfers less on average during SLOW_SECONDS may lose its place."""
SLOW_SECONDS = 1.0
POLL_SECONDS = 0.1
"""Seconds between two searches for a slow client, while a connection waits."""
ACCEPT_RETRY_SECONDS = 0.5
"""Pause after accept() failed, for example because the process has too many open files."""


class _ClientSocket(socket.socket):
    """Counts the bytes that a client has sent and received."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected.family, connected.type, connected.proto, connected.detach())
        self.transferred = 0
        self._rate = float("inf")
        self._counted = 0
        self._counted_at = time.monotonic()

    def send(self, *args: Any) -> int:
        sent = super().send(*args)
        self.transferred += sent
        return sent

    def recv_into(self, *args: Any) -> int:
        received = super().recv_into(*args)
        self.transferred += received
        return received

    def rate(self) -> float:
        """Returns the bytes per second during the last SLOW_SECONDS or longer, or infinity for a client that is new."""
        now = time.monotonic()
        if now - self._counted_at > SLOW_SECONDS:
            self._rate = (self.transferred - self._counted) / (now - self._counted_at)
            self._counted, self._counted_at = self.transferred, now
        return self._rate


class LoopbackServer(ABC):
    """Accepts connections in a daemon thread. Subclasses implement the protocol."""

    def __init__(self, address: Address, service: str, option: str, warn: Callable[[str], None]) -> None:
        """Binds and listens at once. `service` names the server in messages; `option` is the user's option that holds
        the address."""
        self._service, self._warn = service, warn
        self._closed = False
        self._free_places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._free_waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._served: set[_ClientSocket] = set()
        self._changing = threading.Lock()
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address.host, address.port))
        except OSError as error:
            self._socket.close()
            raise BackplaneError(
                f"{service} cannot listen on {address}: {error}; name another port in '{option}'"
            ) from error
        self._socket.listen(MAX_WAITING)
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
            if self._free_waiting.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="peer-request", daemon=True).start()
            else:
                self._reject(sock)

    def _reject(self, sock: socket.socket) -> None:
        with sock:
            try:
                self.reject(sock)
            except OSError:  # the client has closed the connection already
                return

    def _serve(self, sock: socket.socket) -> None:
        try:
            has_place = self._wait_for_place()
        finally:
            self._free_waiting.release()
        if not has_place:
            self._reject(sock)
            return
        try:
            with _ClientSocket(sock) as client:
                self._handle(client)
        except (OSError, WireError) as error:
            self._warn(f"a request to {self._service} was not completed: {error}")
        finally:
            self._free_places.release()

    def _handle(self, client: _ClientSocket) -> None:
        """Serves a client, which may lose its place meanwhile."""
        with self._changing:
            self._served.add(client)
        try:
            self.handle(client)
        finally:
            with self._changing:
                self._served.discard(client)

    def _wait_for_place(self) -> bool:
        """Waits until a connection can be served, and disconnects slow clients meanwhile. Returns whether it can."""
        end = time.monotonic() + WAIT_SECONDS
        while not self._free_places.acquire(timeout=POLL_SECONDS):
            if time.monotonic() > end:
                return False
            with self._changing:
                slowest = min(self._served, key=_ClientSocket.rate, default=None)
                if slowest is not None and slowest.rate() < SLOW_BYTES_PER_SECOND:
                    self._served.discard(slowest)
                    _disconnect(slowest)
        return True


def _disconnect(client: socket.socket) -> None:
    """Ends a connection, so that the thread which serves it gets an error."""
    try:
        client.shutdown(socket.SHUT_RDWR)
    except OSError:  # the client has disconnected itself
        return
