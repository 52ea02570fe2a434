"""Where slots are: in host memory, or in a file of this worker."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

import numpy
import numpy.typing

from vllm_backplane.device.host import host_memory
from vllm_backplane.errors import BackplaneError

Bytes = numpy.typing.NDArray[numpy.uint8]


class Slots(Protocol):
    def write(self, slot: int, row: Bytes) -> None: ...
    def read(self, slot: int) -> Bytes:
        """May be the slot itself, so valid until the slot is written."""
        ...

    def close(self) -> None: ...
    def describe(self) -> str: ...


class MemorySlots:
    def __init__(self, count: int, size: int, spoken_for: int, workers: int = 1) -> None:
        """`spoken_for`: bytes of host memory that others have been promised and not taken yet, per worker, of which
        `workers` do the same."""
        free = host_memory().free - workers * spoken_for
        if workers * count * size > free:
            raise BackplaneError(
                f"the second KV tier may take {workers * count * size} bytes of host memory, and {max(free, 0)} are "
                "free; lower 'capacity', or keep blocks on disk with 'folder'"
            )
        self._rows = numpy.empty((count, size), numpy.uint8)  # becomes memory as it is written

    def write(self, slot: int, row: Bytes) -> None:
        self._rows[slot] = row

    def read(self, slot: int) -> Bytes:
        return self._rows[slot]

    def close(self) -> None:
        self._rows = self._rows[:0]

    def describe(self) -> str:
        return "host memory"


class FileSlots:
    """In a file without a name, which nobody else can open and which goes when the process does, however it ends."""

    def __init__(self, folder: Path, count: int, size: int, workers: int = 1) -> None:
        free = shutil.disk_usage(folder).free
        if workers * count * size > free:
            raise BackplaneError(
                f"the second KV tier may take {workers * count * size} bytes in {folder}, and {free} are free there; "
                "lower 'capacity', or name another 'folder'"
            )
        self._folder, self._size = folder, size
        self._opened = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # until it is closed
        self._file = self._opened.fileno()
        os.truncate(self._file, count * size)

    def write(self, slot: int, row: Bytes) -> None:
        left = row.data
        while left:
            done = os.pwrite(self._file, left, slot * self._size + self._size - len(left))
            left = left[done:]

    def read(self, slot: int) -> Bytes:
        row = numpy.empty(self._size, numpy.uint8)
        place = 0
        while place < self._size:
            done = os.preadv(self._file, [row.data[place:]], slot * self._size + place)
            if done == 0:
                raise OSError(f"{self.describe()} ends at {slot * self._size + place}, in the middle of a block")
            place += done
        return row

    def close(self) -> None:
        self._opened.close()

    def describe(self) -> str:
        return f"a file without a name in {self._folder}"
