"""Provides fixed-size slots for blocks, in host memory or in a file of this worker."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

import numpy
import numpy.typing

from vllm_backplane.device.host_memory import usable_memory
from vllm_backplane.errors import BackplaneError

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

    def __init__(self, count: int, size: int, reserved: int, workers: int = 1) -> None:
        """Raises if the host has too little free memory. `workers` is the number of workers that do the same on this
        host; `reserved` is what each of them has reserved for another use and not allocated yet, in bytes."""
        free = usable_memory().free - workers * reserved
        if workers * count * size > free:
            raise BackplaneError(
                f"KV offload may use {workers * count * size} bytes of host memory, but only {max(free, 0)} are free; "
                "lower 'capacity', or store blocks on disk with 'folder'"
            )
        self._rows = numpy.empty((count, size), numpy.uint8)  # becomes resident as it is written

    def write(self, slot: int, row: Bytes) -> None:
        self._rows[slot] = row

    def read(self, slot: int) -> Bytes:
        return self._rows[slot]

    def close(self) -> None:
        self._rows = self._rows[:0]

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
