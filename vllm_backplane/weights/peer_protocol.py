"""What two servers say to each other about weights: one question and one answer per connection, over loopback.

question: MAGIC, kind, digest of the listing (32 bytes, zeros if it is not known yet), number of the first tensor
answer to DESCRIBE: status, length, the listing as JSON
answer to GET: status, and the bytes of every tensor of the listing from the first one asked for
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from vllm_backplane.peering.connection import Line, WireError
from vllm_backplane.weights.model_state import Numbers

MAGIC = b"backplane-weights-1\n"
DIGEST_BYTES = 32
UNKNOWN = bytes(DIGEST_BYTES)
MOST_TEXT = 1 << 28
BYTES_PER_SECOND = 16 << 20
"""A peer that is slower than this is taken for one that hangs."""
_HEAD = struct.Struct(f"!{len(MAGIC)}sB{DIGEST_BYTES}sI")
_COUNT = struct.Struct("!I")


class Kind(IntEnum):
    DESCRIBE = 1
    GET = 2


class Status(IntEnum):
    OK = 0
    BUSY = 1
    CHANGED = 2


@dataclass(frozen=True, slots=True)
class Tensor:
    path: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    description: dict[str, Any]
    """Of the model, and of the worker's part of it."""
    tensors: tuple[Tensor, ...]
    numbers: Numbers

    def text(self) -> bytes:
        tensors = [[one.path, one.dtype, one.shape, one.digest] for one in self.tensors]
        told = {"description": self.description, "tensors": tensors, "numbers": self.numbers}
        return json.dumps(told, sort_keys=True).encode()

    @classmethod
    def read(cls, text: bytes) -> Listing:
        try:
            told = json.loads(text)
            tensors = tuple(
                Tensor(str(path), str(dtype), tuple(map(int, shape)), str(digest))
                for path, dtype, shape, digest in told["tensors"]
            )
            return cls(dict(told["description"]), tensors, dict(told["numbers"]))
        except (ValueError, KeyError, TypeError) as fault:
            raise WireError(f"that is no listing of weights ({type(fault).__name__}: {fault})") from fault


def digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Question:
    kind: Kind
    listing: bytes = UNKNOWN
    first: int = 0

    def ask(self, line: Line) -> None:
        line.send(_HEAD.pack(MAGIC, self.kind, self.listing, self.first))

    @classmethod
    def asked(cls, line: Line) -> Question:
        magic, kind, listing, first = _HEAD.unpack(line.receive(_HEAD.size))
        if magic != MAGIC or kind not in set(Kind):
            raise WireError("that is no question about weights")
        return cls(Kind(kind), listing, first)


def tell_text(line: Line, text: bytes) -> None:
    line.send(_COUNT.pack(len(text)) + text)


def text(line: Line) -> bytes:
    [count] = _COUNT.unpack(line.receive(_COUNT.size))
    if count > MOST_TEXT:
        raise WireError(f"a listing of {count} bytes")
    return line.receive(count)
