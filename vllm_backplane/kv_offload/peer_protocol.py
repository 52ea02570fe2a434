"""What two servers say to each other about blocks: one question and one answer per connection, over loopback.

    question: MAGIC, kind, identity of the model (32 bytes), number of keys, the keys
    answer to HAVE: status, how many of the first keys are there
    answer to GET: status; for each key 0, or 1 with checksum and bytes

Both sides know how long a block is, because it is part of the identity.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from vllm_backplane.kv_offload.block_keys import KEY_BYTES
from vllm_backplane.kv_offload.slots import Bytes
from vllm_backplane.peering.connection import Line, WireError
from vllm_backplane.peering.digests import digests

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


@dataclass(frozen=True, slots=True)
class Question:
    kind: Kind
    identity: bytes
    keys: list[bytes]


class BlockLine(Line):
    """A line on which blocks are asked for and given."""

    def ask(self, question: Question) -> None:
        head = _HEAD.pack(MAGIC, question.kind, question.identity, len(question.keys))
        self.send(head + b"".join(question.keys))

    def asked(self) -> Question:
        magic, kind, identity, count = _HEAD.unpack(self.receive(_HEAD.size))
        if magic != MAGIC or kind not in set(Kind) or count > MOST_KEYS:
            raise WireError("that is no question about blocks")
        keys = self.receive(count * KEY_BYTES)
        return Question(Kind(kind), identity, [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)])

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


def identity(model: torch.nn.Module, description: dict[str, Any]) -> bytes:
    """Of all bytes, not of samples: models that differ in a few rows must not share."""
    whole = hashlib.blake2b(json.dumps(description, sort_keys=True, default=str).encode(), digest_size=IDENTITY_BYTES)
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda named: named[0])
    for digest in digests(tensors):
        whole.update(digest)
    return whole.digest()
