"""Defines the protocol by which servers exchange KV cache blocks: one request and one response per connection.

    request: MAGIC, kind, identity of the model (32 bytes), number of keys, the keys
    response to HAVE: status, how many of the first keys are stored
    response to GET: status; for each key 0, or 1 with checksum and bytes

The size of a block is not sent: it is part of the identity, so both servers have the same.
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
from vllm_backplane.peering.connection import Connection, WireError
from vllm_backplane.peering.digests import tensor_digests

MAGIC = b"backplane-kv-1\n"
MAX_KEYS = 1 << 16
CHECKSUM_BYTES = 16
IDENTITY_BYTES = 32
_HEADER = struct.Struct(f"!{len(MAGIC)}sB{IDENTITY_BYTES}sI")


class Kind(IntEnum):
    HAVE = 1
    GET = 2


class Status(IntEnum):
    OK = 0
    OTHER_MODEL = 1
    BUSY = 2


@dataclass(frozen=True, slots=True)
class Request:
    kind: Kind
    identity: bytes
    keys: list[bytes]


class BlockConnection(Connection):
    """Sends and receives the messages of this protocol."""

    def send_request(self, request: Request) -> None:
        header = _HEADER.pack(MAGIC, request.kind, request.identity, len(request.keys))
        self.send(header + b"".join(request.keys))

    def receive_request(self) -> Request:
        magic, kind, identity, count = _HEADER.unpack(self.receive(_HEADER.size))
        if magic != MAGIC or kind not in set(Kind) or count > MAX_KEYS:
            raise WireError("the client sent something other than a request for KV blocks")
        keys = self.receive(count * KEY_BYTES)
        return Request(
            Kind(kind), identity, [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
        )

    def send_block(self, checksum: bytes, row: Bytes) -> None:
        self.send(b"\1" + checksum)
        self.send(row.data)

    def send_no_block(self) -> None:
        self.send(b"\0")

    def receive_block_into(self, row: Bytes) -> bytes | None:
        """Receives a block into `row`. Returns the checksum that was sent with it, or None if the peer has no such
        block."""
        present = self.receive(1)
        if present == b"\0":
            return None
        if present != b"\1":
            raise WireError(f"the peer sent {present!r} where 0 (no block) or 1 (a block) is expected")
        checksum = self.receive(CHECKSUM_BYTES)
        self.receive_into(row.data)
        return checksum


def model_identity(model: torch.nn.Module, description: dict[str, Any]) -> bytes:
    """Returns a digest of a model's description and of all bytes of its weights. Samples of the bytes would not do:
    models that differ in a few rows must not exchange blocks."""
    whole = hashlib.blake2b(json.dumps(description, sort_keys=True, default=str).encode(), digest_size=IDENTITY_BYTES)
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda named: named[0])
    for digest in tensor_digests(tensors):
        whole.update(digest)
    return whole.digest()
