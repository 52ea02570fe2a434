"""Maps one GGUF file into memory and reads its metadata and the positions of its tensors.

The whole header is validated when the file is opened, before anything is used: the tensors must fill the file exactly,
one after another, with the padding that the format prescribes. A wrong type or shape would leave a gap or an overlap.
Block sizes come from the `gguf` package.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import weakref
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vllm_backplane.errors import CheckpointError, short_repr
from vllm_backplane.gguf.cursor import LIMITS, Cursor, Limits
from vllm_backplane.gguf.tensor_types import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SMALLEST_KEY = 8 + 1 + 4 + 1
SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """Describes a tensor of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch; the file has the reverse order."""
    offset: int
    """Bytes from the beginning of the file."""
    size: int
    """Size in bytes."""

    @property
    def row_bytes(self) -> int:
        per_block, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // per_block * block_bytes


class _Mapping(mmap.mmap):
    """Maps a file into memory, and remembers its state. It lives as long as any view of its bytes."""

    path: Path
    descriptor: int
    state: tuple[int, int]

    def found(self) -> tuple[int, int]:
        """Returns the size and the modification time of the file now."""
        now = os.fstat(self.descriptor)
        return now.st_size, now.st_mtime_ns


_mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()


def require_unchanged_files() -> None:
    """Raises if a file that this process has mapped was changed since it was opened.

    Reading a page beyond the new end of a file would end the process with a signal, and other bytes in the place of
    weights would give wrong outputs.
    """
    for mapping in _mappings:
        now = mapping.found()
        if now != mapping.state:
            sizes = f" (it had {mapping.state[0]} bytes, and has {now[0]})" if now[0] != mapping.state[0] else ""
            raise CheckpointError(
                f"{mapping.path} was changed while it is served{sizes}; start the server again. To replace the file of "
                "a running server, rename the new file to its name"
            )


class GgufFile:
    """Gives access to an open GGUF file. It needs no closing: the mapping ends with the last view of its data."""

    def __init__(self, path: str | os.PathLike[str], limits: Limits = LIMITS) -> None:
        self.path = Path(path)
        self._map = _mapped(self.path)
        self.data = memoryview(self._map)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        cursor = Cursor(self.data, str(path), limits)
        self.version, tensors, keys = _preamble(cursor, limits)
        for _ in range(keys):
            key = cursor.text("a metadata key", limits.key_bytes)
            if not key or key in self.metadata:
                raise cursor.fault(f"the metadata key {short_repr(key)} " + ("occurs twice" if key else "is empty"))
            self.metadata[key] = cursor.value(f"the metadata {short_repr(key)}")
        self.alignment = _alignment(self.metadata, cursor, limits)
        found = [_tensor(cursor, limits) for _ in range(tensors)]
        self.header_size = cursor.position
        self._place(found, cursor)

    def _aligned(self, position: int) -> int:
        return -(-position // self.alignment) * self.alignment

    def _place(self, found: list[Tensor], cursor: Cursor) -> None:
        begin = self._aligned(self.header_size)
        for tensor in found:
            if tensor.name in self.tensors:
                raise cursor.fault(f"the tensor {tensor.name!r} occurs twice")
            if tensor.offset % self.alignment:
                raise cursor.fault(
                    f"the tensor {tensor.name!r} is misaligned: its offset {tensor.offset} is not a multiple of "
                    f"{self.alignment}"
                )
            if begin + tensor.offset + tensor.size > len(self.data):
                raise cursor.fault(
                    f"the tensor {tensor.name!r} ends at byte {begin + tensor.offset + tensor.size} and the file at "
                    f"{len(self.data)}"
                )
            self.tensors[tensor.name] = Tensor(
                tensor.name, tensor.type, tensor.shape, begin + tensor.offset, tensor.size
            )
        end, before = begin, "the header"
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset != self._aligned(end):
                kind = "overlap" if tensor.offset < self._aligned(end) else f"have a gap of {tensor.offset - end} bytes"
                raise cursor.fault(f"{before} and the tensor {tensor.name!r} {kind}")
            end, before = tensor.offset + tensor.size, f"the tensor {tensor.name!r}"
        if self.tensors and len(self.data) not in (end, self._aligned(end)):
            raise cursor.fault(f"it ends at byte {len(self.data)}, and {before} at {end}")

    def bytes_of(self, tensor: Tensor) -> memoryview:
        return self.data[tensor.offset : tensor.offset + tensor.size]

    def forget_pages(self) -> None:
        """Unmaps the pages read so far, so that they no longer count as memory of this process.

        A later access maps them again from the page cache.
        """
        self._map.madvise(mmap.MADV_DONTNEED)

    def header_digest(self) -> str:
        """Returns a digest of the header and the file's size, which determine the configuration and the tokenizer."""
        digest = hashlib.sha256(self.data[: self.header_size])
        digest.update(str(len(self.data)).encode())
        return digest.hexdigest()


def is_gguf(path: Path) -> bool:
    """Returns whether `path` is a file with a GGUF suffix or the GGUF magic number."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except PermissionError:
        return False


def _mapped(path: Path) -> _Mapping:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as fault:
        raise CheckpointError(
            f"{path} cannot be opened: {fault.strerror}; give the path of a readable GGUF file"
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path} is not a regular file; give the path of a GGUF file")
        if found.st_size < len(MAGIC) + 4:
            raise CheckpointError(f"{path} has {found.st_size} bytes, too few for a GGUF file; download it again")
        mapping = _Mapping(descriptor, found.st_size, access=mmap.ACCESS_READ)
    except BaseException:
        os.close(descriptor)
        raise
    mapping.path, mapping.descriptor, mapping.state = path, descriptor, (found.st_size, found.st_mtime_ns)
    weakref.finalize(mapping, os.close, descriptor)
    _mappings.add(mapping)
    return mapping


def _preamble(cursor: Cursor, limits: Limits) -> tuple[int, int, int]:
    """Returns the version, the number of tensors and the number of metadata keys."""
    magic = bytes(cursor.take(len(MAGIC), "the magic number"))
    if magic != MAGIC:
        raise cursor.fault(f"it begins with {magic!r} instead of {MAGIC!r}")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise cursor.fault("it is big-endian, which is not supported")
    if version not in VERSIONS:
        raise cursor.fault(f"it has version {version}; versions {' and '.join(map(str, VERSIONS))} are supported")
    tensors, keys = cursor.u64("the number of tensors"), cursor.u64("the number of metadata keys")
    for what, count, smallest, most in (
        ("tensors", tensors, SMALLEST_TENSOR, limits.tensors),
        ("metadata keys", keys, SMALLEST_KEY, limits.keys),
    ):
        if count > min(most, cursor.left // smallest):
            raise cursor.fault(f"its header declares {count} {what}, more than it can hold")
    return version, tensors, keys


def _alignment(metadata: dict[str, Any], cursor: Cursor, limits: Limits) -> int:
    found = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(found) is not int or found % 8 or found.bit_count() != 1 or found > limits.alignment:
        raise cursor.fault(f"general.alignment is {short_repr(found)}, not a power of two from 8 to {limits.alignment}")
    return found


def _tensor(cursor: Cursor, limits: Limits) -> Tensor:
    """Reads one tensor description. Its `offset` is still relative to the beginning of the tensor data."""
    name = cursor.text("a tensor's name", limits.name_bytes)
    count = cursor.u32(f"the tensor {name!r}")
    if not 1 <= count <= limits.dimensions:
        raise cursor.fault(f"the tensor {name!r} has {count} dimensions; 1 to {limits.dimensions} are allowed")
    shape = tuple(cursor.u64(f"the tensor {name!r}") for _ in range(count))[::-1]
    number = cursor.u32(f"the tensor {name!r}")
    try:
        kind = GGMLQuantizationType(number)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise cursor.fault(f"the tensor {name!r} has the unknown type {number}") from None
    if min(shape) == 0:
        raise cursor.fault(f"the tensor {name!r} is empty: {shape}")
    if shape[-1] % per_block:
        raise cursor.fault(
            f"the tensor {name!r} has rows of {shape[-1]} values, not a multiple of {kind.name}'s {per_block}"
        )
    size = prod(shape) // per_block * block_bytes
    return Tensor(name, kind, shape, cursor.u64(f"the tensor {name!r}"), size)
