"""Sends and receives bytes over a TCP connection, with a deadline for the whole exchange.

A socket's own timeout applies to each call, so a peer that sends one byte at a time would never exceed it.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TypeVar

from vllm_backplane.peering.addresses import Address

_Status = TypeVar("_Status", bound=IntEnum)
_COUNT = struct.Struct("!I")
_PIECE_BYTES = 1 << 20

MIN_BYTES_PER_SECOND = 16 << 20
"""Deadlines of large transfers are computed from this rate. A slower peer is treated as one that hangs."""


class WireError(Exception):
    """Reports that the peer closed the connection early, sent bytes outside the protocol, or declined the request."""


@contextmanager
def connect(address: Address, seconds: float) -> Iterator[socket.socket]:
    """Opens a TCP connection, with a timeout in seconds, and closes it at the end of the block."""
    with socket.socket(address.family, socket.SOCK_STREAM) as sock:
        sock.settimeout(seconds)
        sock.connect((address.host, address.port))
        yield sock


class Connection:
    """Wraps a connected socket with a deadline, after which every send and receive raises TimeoutError."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._deadline = time.monotonic() + seconds

    def reset_deadline(self, seconds: float) -> None:
        """Sets the deadline to `seconds` from now, so that time which this process spent elsewhere does not count."""
        self._deadline = time.monotonic() + seconds

    def _set_timeout(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(left)

    def send(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            self._set_timeout()
            left = left[self._sock.send(left) :]

    def receive(self, count: int) -> bytes:
        """Returns the next `count` bytes. Memory is taken as they arrive, because the peer chooses the number."""
        received = bytearray()
        while len(received) < count:
            piece = bytearray(min(count - len(received), _PIECE_BYTES))
            self.receive_into(memoryview(piece))
            received += piece
        return bytes(received)

    def receive_into(self, buffer: memoryview) -> None:
        while buffer:
            self._set_timeout()
            received = self._sock.recv_into(buffer)
            if received == 0:
                raise WireError("the peer closed the connection in the middle of a message")
            buffer = buffer[received:]

    def send_status(self, status: IntEnum) -> None:
        """Sends the status byte, with which every response begins."""
        self.send(bytes([status]))

    def receive_status(self, kind: type[_Status]) -> _Status:
        [value] = self.receive(1)
        try:
            return kind(value)
        except ValueError:
            raise WireError(f"{value} is not a known status") from None

    def send_count(self, count: int) -> None:
        """Sends a number of 32 bits, in network byte order."""
        self.send(_COUNT.pack(count))

    def receive_count(self) -> int:
        return int(_COUNT.unpack(self.receive(_COUNT.size))[0])
