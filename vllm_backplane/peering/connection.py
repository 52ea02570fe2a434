"""Bytes to and from another server, in a time that is agreed on before."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TypeVar

from vllm_backplane.peering.addresses import Address

_Status = TypeVar("_Status", bound=IntEnum)


class WireError(Exception):
    """What came is not what was agreed on."""


@contextmanager
def connected(to: Address, seconds: float) -> Iterator[socket.socket]:
    with socket.socket(to.family, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect((to.host, to.port))
        yield connection


class Line:
    """A connection with a moment at which everything on it must be over."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._end = time.monotonic() + seconds

    def renew(self, seconds: float) -> None:
        """Begin to count again: whoever reads may have had something else to do."""
        self._end = time.monotonic() + seconds

    def _limit(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        self._connection.settimeout(left)

    def send(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            self._limit()
            left = left[self._connection.send(left) :]

    def receive(self, count: int) -> bytes:
        buffer = bytearray(count)
        self.receive_into(memoryview(buffer))
        return bytes(buffer)

    def receive_into(self, buffer: memoryview) -> None:
        while buffer:
            self._limit()
            done = self._connection.recv_into(buffer)
            if done == 0:
                raise WireError("the connection ended in the middle")
            buffer = buffer[done:]

    def tell_status(self, status: IntEnum) -> None:
        """How an answer begins: in one byte."""
        self.send(bytes([status]))

    def status(self, of: type[_Status]) -> _Status:
        [given] = self.receive(1)
        try:
            return of(given)
        except ValueError:
            raise WireError(f"{given} is no status") from None
