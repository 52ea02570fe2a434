"""Provides fixed-size slots for blocks, in host memory or in a file of this worker."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Protocol

import numpy
import numpy.typing

from vllm_backplane.errors import BackplaneError
from vllm_backplane.host.memory_ledger import ledger

Bytes = numpy.typing.NDArray[numpy.uint8]


class Slots(Protocol):
    """Defines the interface of a fixed number of slots, each of the size of one block."""

    def write(self, slot: int, row: Bytes) -> None: ...
    def read(self, slot: int) -> Bytes:
        """Returns the bytes of a slot, possibly as a view that is valid until the slot is written."""
        ...

    def close(self) -> None: ...
    def describe(self) -> str: ...


class MemorySlots:
    """Keeps slots in host memory."""

    def __init__(self, count: int, size: int) -> None:
        """Reserves the memory, or raises if the host has too little that is free."""
        remedy = "lower 'capacity', or store blocks on disk with 'folder'"
        ledger.reserve(count * size, purpose="KV offload to host memory", remedy=remedy)
        self._cancel = weakref.finalize(self, ledger.cancel, count * size)
        self._rows = numpy.empty((count, size), numpy.uint8)  # becomes resident as it is written

    def write(self, slot: int, row: Bytes) -> None:
        self._rows[slot] = row

    def read(self, slot: int) -> Bytes:
        return self._rows[slot]

    def close(self) -> None:
        self._rows = numpy.empty((0, 0), numpy.uint8)
        self._cancel()

    def describe(self) -> str:
        return "host memory"


class FileSlots:
    """Keeps slots in an unnamed file, which no other program can open by name, and which the system removes when the
    process ends, however it ends."""

    def __init__(self, folder: Path, count: int, size: int, workers: int = 1) -> None:
        free = shutil.disk_usage(folder).free
        if workers * count * size > free:
            raise BackplaneError(
                f"KV offload may use {workers * count * size} bytes in {folder}, but only {free} are free there; lower "
                "'capacity', or name another 'folder'"
            )
        self._folder, self._size = folder, size
        self._opened = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # close() closes it
        self._file = self._opened.fileno()
        os.truncate(self._file, count * size)

    def write(self, slot: int, row: Bytes) -> None:
        left = row.data
        while left:
            done = os.pwrite(self._file, left, slot * self._size + self._size - len(left))
            left = left[done:]

    def read(self, slot: int) -> Bytes:
        row = numpy.empty(self._size, numpy.uint8)
        filled = 0
        while filled < self._size:
            done = os.preadv(self._file, [row.data[filled:]], slot * self._size + filled)
            if done == 0:
                raise OSError(f"{self.describe()} ends at byte {slot * self._size + filled}, in the middle of a block")
            filled += done
        return row

    def close(self) -> None:
        self._opened.close()

    def describe(self) -> str:
        return f"an unnamed file in {self._folder}"
