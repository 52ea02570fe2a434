"""What two servers say to each other about blocks: one question and one answer per connection, over loopback.

    question: MAGIC, kind, identity of the model (32 bytes), number of keys, the keys
    answer to HAVE: status, how many of the first keys are there
    answer to GET: status; for each key 0, or 1 with checksum and bytes

Both sides know how long a block is, because it is part of the identity.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from vllm_backplane.kv_tier.keys import KEY_BYTES
from vllm_backplane.kv_tier.slots import Bytes

MAGIC = b"backplane-kv-1\n"
MOST_KEYS = 1 << 16
CHECKSUM_BYTES = 16
IDENTITY_BYTES = 32
_HEAD = struct.Struct(f"!{len(MAGIC)}sB{IDENTITY_BYTES}sI")
_COUNT = struct.Struct("!I")


class Kind(IntEnum):
    HAVE = 1
    GET = 2


class Status(IntEnum):
    OK = 0
    OTHER_MODEL = 1
    BUSY = 2


class WireError(Exception):
    """What came is not what was agreed on."""


@dataclass(frozen=True, slots=True)
class Question:
    kind: Kind
    identity: bytes
    keys: list[bytes]


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

    # --- questions

    def ask(self, question: Question) -> None:
        head = _HEAD.pack(MAGIC, question.kind, question.identity, len(question.keys))
        self.send(head + b"".join(question.keys))

    def asked(self) -> Question:
        magic, kind, identity, count = _HEAD.unpack(self.receive(_HEAD.size))
        if magic != MAGIC or kind not in set(Kind) or count > MOST_KEYS:
            raise WireError("that is no question about blocks")
        keys = self.receive(count * KEY_BYTES)
        return Question(Kind(kind), identity, [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)])

    # --- answers

    def tell_status(self, status: Status) -> None:
        self.send(bytes([status]))

    def status(self) -> Status:
        [given] = self.receive(1)
        try:
            return Status(given)
        except ValueError:
            raise WireError(f"{given} is no status") from None

    def tell_count(self, count: int) -> None:
        self.send(_COUNT.pack(count))

    def count(self) -> int:
        return int(_COUNT.unpack(self.receive(_COUNT.size))[0])

    def tell_block(self, checksum: bytes, row: Bytes) -> None:
        self.send(b"\1" + checksum)
        self.send(row.data)

    def tell_no_block(self) -> None:
        self.send(b"\0")

    def block_into(self, row: Bytes) -> bytes | None:
        """The checksum that came with it; None if there is no such block."""
        present = self.receive(1)
        if present == b"\0":
            return None
        if present != b"\1":
            raise WireError(f"{present!r} is neither a block nor none")
        checksum = self.receive(CHECKSUM_BYTES)
        self.receive_into(row.data)
        return checksum
