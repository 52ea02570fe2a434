"""Reads the primitive values of a GGUF header from untrusted bytes.

A length in the file is used only after checking that so many bytes are there. The reader therefore never takes more
memory than a multiple of the header's own size, and `LIMITS` bounds that. The reader of the `gguf` package has no such
check: with an array that declares 2**60 bytes and has none, it loops and allocates until the process is killed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from vllm_backplane.errors import CheckpointError


class Limits(NamedTuple):
    """Sets upper bounds far above those of real files; a file beyond them is damaged or hostile."""

    keys: int = 1 << 16
    tensors: int = 1 << 16
    """Each takes some 400 bytes of memory, and published files have a few thousand."""
    key_bytes: int = (1 << 16) - 1  # the limit of the format itself
    name_bytes: int = 512
    text_bytes: int = 1 << 24
    nesting: int = 4
    strings: int = 1 << 22
    """Total number of strings in all arrays."""
    inner_arrays: int = 1 << 12
    """Total number of arrays in arrays. Each takes some 500 bytes of memory, and published files have none."""
    dimensions: int = 4
    alignment: int = 1 << 16


LIMITS = Limits()

_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_TEXT, _ARRAY = 8, 9
_SMALLEST_TEXT = 8
_SMALLEST_ARRAY = 12

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Strings:
    """Gives access to an array of strings, which were validated and are decoded when they are read.

    As Python objects, short strings take ten times the memory that they take in the file, and most are not needed.
    """

    def __init__(self, buffer: memoryview, count: int) -> None:
        self._buffer = buffer
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        position = 0
        for _ in range(self._count):
            begin = position + 8
            position = begin + _U64.unpack_from(self._buffer, position)[0]
            yield str(self._buffer[begin:position], "utf-8")

    def __repr__(self) -> str:
        return repr([word[:40] for word, _ in zip(self, range(3), strict=False)])

    def tolist(self) -> list[str]:
        return list(self)


class Cursor:
    """Reads values from a buffer in order; a value that does not fit raises an error with its position."""

    def __init__(self, buffer: memoryview, source: str, limits: Limits = LIMITS) -> None:
        self._buffer = buffer
        self._source = source
        self._limits = limits
        self._strings = self._inner_arrays = 0
        self.position = 0

    @property
    def left(self) -> int:
        return len(self._buffer) - self.position

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._source} is not a valid GGUF file: {what} (at byte {self.position}); download it again, or convert "
            "the model again with a current converter"
        )

    def take(self, size: int, what: str) -> memoryview:
        if size > self.left:
            raise self.fault(f"{what} takes {size} bytes, and {self.left} are left")
        taken = self._buffer[self.position : self.position + size]
        self.position += size
        return taken

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def text(self, what: str, most: int) -> str:
        size = self.u64(what)
        if size > most:
            raise self.fault(f"{what} declares {size} bytes, more than {most}")
        taken = self.take(size, what)
        try:
            return str(taken, "utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8") from None

    def value(self, what: str) -> Any:
        return self._of_kind(self.u32(what), what, 0)

    def _of_kind(self, kind: int, what: str, depth: int) -> Any:
        number = _NUMBERS.get(kind)
        if number is not None:
            return self._numbers(number, 1, what)[0].item()
        if kind == _TEXT:
            return self.text(what, self._limits.text_bytes)
        if kind == _ARRAY:
            return self._array(what, depth + 1)
        raise self.fault(f"{what} has the unknown type {kind}")

    def _array(self, what: str, depth: int) -> Any:
        """Returns a numpy array of numbers, an array of strings, or a list of arrays."""
        if depth > self._limits.nesting:
            raise self.fault(f"{what} has arrays nested more than {self._limits.nesting} deep")
        kind, count = self.u32(what), self.u64(what)
        number = _NUMBERS.get(kind)
        if number is not None:
            return self._numbers(number, count, what)
        if kind not in (_TEXT, _ARRAY):
            raise self.fault(f"{what} is an array of the unknown type {kind}")
        self._require_fit(count, _SMALLEST_TEXT if kind == _TEXT else _SMALLEST_ARRAY, what)
        if kind == _TEXT:
            self._strings += count
            if self._strings > self._limits.strings:
                raise self.fault(f"with {what} the file has more than {self._limits.strings} strings")
            return self._texts(count, what)
        self._inner_arrays += count
        if self._inner_arrays > self._limits.inner_arrays:
            raise self.fault(f"with {what} the file has more than {self._limits.inner_arrays} arrays in arrays")
        return [self._of_kind(kind, what, depth) for _ in range(count)]

    def _texts(self, count: int, what: str) -> Strings:
        """Validates strings like `text`, inlined for speed: vocabularies are most of a header."""
        buffer, position, end, most = self._buffer, self.position, len(self._buffer), self._limits.text_bytes
        length, first, valid = _U64.unpack_from, position, 0
        for _ in range(count):
            if end - position < 8:
                break
            size = length(buffer, position)[0]
            begin = position + 8
            if size > most or size > end - begin:
                break
            try:
                str(buffer[begin : begin + size], "utf-8")
            except UnicodeDecodeError:
                break
            position = begin + size
            valid += 1
        self.position = position
        if valid < count:
            self.text(what, most)  # raises the error for the string that the loop stopped at
        return Strings(buffer[first:position], count)

    def _numbers(self, number: np.dtype[Any], count: int, what: str) -> np.ndarray[Any, Any]:
        self._require_fit(count, number.itemsize, what)
        taken = np.frombuffer(self.take(count * number.itemsize, what), dtype=np.uint8)
        if number.kind == "b" and bool((taken > 1).any()):
            raise self.fault(f"{what} has a boolean that is neither 0 nor 1")
        return taken.view(number)

    def _require_fit(self, count: int, size: int, what: str) -> None:
        if count > self.left // size:
            raise self.fault(
                f"{what} declares {count} elements of at least {size} bytes, and {self.left} bytes are left"
            )
