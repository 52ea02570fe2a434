"""Puts a JSON document and a file into one input: the length of the document (4 bytes), the document, the file."""

from __future__ import annotations

import json
import random
import struct

from tests.fuzz.mutations import LONGEST, mutate_bytes, mutate_json_bytes

_LENGTH = struct.Struct("<I")


def join(document: bytes, file: bytes) -> bytes:
    """Returns the input."""
    return _LENGTH.pack(len(document)) + document + file


def split(data: bytes) -> tuple[bytes, bytes]:
    """Returns the document and the file of an input. Any bytes are an input."""
    if len(data) < _LENGTH.size:
        return b"", b""
    length = min(_LENGTH.unpack_from(data)[0], len(data) - _LENGTH.size)
    return data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]


def mutate(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Returns the input with a changed document, a changed file, or the file of another input.

    Half of the changes to a safetensors file leave its header, which is read by the safetensors library, as it is.
    """
    document, file = split(data)
    match chance.randrange(5):
        case 0 | 1 | 2:
            document = mutate_json_bytes(document, [split(one)[0] for one in others], chance)
        case 3:
            start = _LENGTH.size + 4 + int.from_bytes(file[:8], "little") if chance.random() < 0.5 else 0
            start = min(start, len(file))
            file = file[:start] + mutate_bytes(file[start:], [file[start:]], chance)[: len(file) - start]
        case _:
            file = split(chance.choice(others))[1]
    return join(document, file[: LONGEST * 2])


def dumps(document: object) -> bytes:
    """Returns the bytes of a JSON document."""
    return json.dumps(document).encode()
