"""Builds GGUF files byte by byte, valid or with one error, because the gguf package writes only valid files."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

F32, Q4_0, Q8_0 = 0, 2, 8
U8, U32, F32_VALUE, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def array(kind: int, count: int, elements: bytes) -> bytes:
    return u32(kind) + u64(count) + elements


def tensor(name: str | bytes, dimensions: list[int], kind: int, offset: int, count: int | None = None) -> bytes:
    sizes = b"".join(u64(size) for size in dimensions)
    return text(name) + u32(len(dimensions) if count is None else count) + sizes + u32(kind) + u64(offset)


@dataclass
class File:
    """Describes a small valid file; a test changes one field."""

    magic: bytes = b"GGUF"
    version: int = 3
    keys: list[bytes] = field(
        default_factory=lambda: [
            key("general.architecture", STRING, text("llama")),
            key("some.numbers", ARRAY, array(U32, 3, u32(1) + u32(2) + u32(3))),
            key("some.words", ARRAY, array(STRING, 2, text("a") + text("é"))),
            key("some.truth", BOOL, b"\x01"),
            key("nested", ARRAY, array(ARRAY, 2, array(U8, 1, b"\x07") + array(STRING, 1, text("x")))),
        ]
    )
    tensors: list[bytes] = field(
        default_factory=lambda: [
            tensor("blk.0.w", [32, 2], Q4_0, 0),
            tensor("norm", [4], F32, 64),
        ]
    )
    key_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32
    data: bytes = bytes(64 + 16)

    def header(self) -> bytes:
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        keys = len(self.keys) if self.key_count is None else self.key_count
        return b"".join([self.magic, u32(self.version), u64(tensors), u64(keys), *self.keys, *self.tensors])

    def build(self) -> bytes:
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + self.data
