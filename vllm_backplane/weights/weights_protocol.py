"""Defines the protocol by which a server fetches weights from another one: one request and one response per connection.

request: MAGIC, kind, digest of the manifest (32 bytes, zeros if it is not known yet), index of the first tensor
response to DESCRIBE: status, length, the manifest as JSON
response to GET: status, and the bytes of every tensor of the manifest from the first requested one on
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from vllm_backplane.peering.connection import Connection, WireError
from vllm_backplane.peering.digests import DIGEST_BYTES
from vllm_backplane.weights.model_tensors import Scalars

MAGIC = b"backplane-weights-1\n"
UNKNOWN = bytes(DIGEST_BYTES)
MAX_MANIFEST_BYTES = 1 << 28
_HEADER = struct.Struct(f"!{len(MAGIC)}sB{DIGEST_BYTES}sI")


class Kind(IntEnum):
    DESCRIBE = 1
    GET = 2


class Status(IntEnum):
    OK = 0
    BUSY = 1
    CHANGED = 2


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Describes a tensor of the manifest. `path` leads from the model to the tensor; `digest` is hexadecimal."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes what a worker's model consists of after loading. The JSON keys are part of the protocol."""

    description: dict[str, Any]
    """The model, the options that affect its weights, and the worker's rank."""
    tensors: tuple[TensorEntry, ...]
    scalars: Scalars

    def encode(self) -> bytes:
        tensors = [[entry.path, entry.dtype, entry.shape, entry.digest] for entry in self.tensors]
        content = {"description": self.description, "tensors": tensors, "numbers": self.scalars}
        return json.dumps(content, sort_keys=True).encode()

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        try:
            content = json.loads(text)
            tensors = tuple(_entry(*entry) for entry in content["tensors"])
            description, scalars = content["description"], content["numbers"]
            if type(description) is not dict or type(scalars) is not dict:
                raise TypeError("description and numbers must be objects")
            return cls(description, tensors, scalars)
        except (ValueError, KeyError, TypeError, RecursionError) as fault:
            raise WireError(f"the peer sent an invalid manifest ({type(fault).__name__}: {fault})") from fault


def _entry(path: Any, dtype: Any, shape: Any, digest: Any) -> TensorEntry:
    """Returns the entry of a tensor. Raises TypeError if a value has another type than this protocol sends."""
    if type(path) is not str or type(dtype) is not str or type(digest) is not str or type(shape) is not list:
        raise TypeError("an entry must have a path, a dtype, a list of sizes and a digest")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise TypeError(f"the shape of {path[:200]!r} is not a list of sizes")
    return TensorEntry(path, dtype, tuple(shape), digest)


def manifest_digest(text: bytes) -> bytes:
    """Returns the digest of an encoded manifest, by which GET names the weights that it expects."""
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Request:
    kind: Kind
    manifest: bytes = UNKNOWN
    """Digest of the manifest to which `first` refers."""
    first: int = 0
    """Index of the first tensor to send."""

    def send(self, connection: Connection) -> None:
        connection.send(_HEADER.pack(MAGIC, self.kind, self.manifest, self.first))

    @classmethod
    def receive(cls, connection: Connection) -> Request:
        magic, kind, manifest, first = _HEADER.unpack(connection.receive(_HEADER.size))
        if magic != MAGIC or kind not in set(Kind):
            raise WireError("the client sent something other than a request for weights")
        return cls(Kind(kind), manifest, first)


def send_manifest(connection: Connection, text: bytes) -> None:
    connection.send_count(len(text))
    connection.send(text)


def receive_manifest(connection: Connection) -> bytes:
    """Returns the encoded manifest. Raises WireError if it is too long."""
    count = connection.receive_count()
    if count > MAX_MANIFEST_BYTES:
        raise WireError(f"the manifest has {count} bytes, more than {MAX_MANIFEST_BYTES}")
    return connection.receive(count)
