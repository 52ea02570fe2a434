"""Where slots are: in host memory, or in a file of this worker."""

from __future__ import annotations

import fcntl
import os
import shutil
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
    def __init__(self, count: int, size: int, spoken_for: int) -> None:
        """`spoken_for`: bytes of host memory that others have been promised and not taken yet."""
        free = host_memory().free - spoken_for
        if count * size > free:
            raise BackplaneError(
                f"the second KV tier may take {count * size} bytes of host memory per worker, and {max(free, 0)} are "
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


_PREFIX, _SUFFIX = "vllm-backplane-kv-", ".blocks"


class FileSlots:
    """The file is this process's alone and locked while that lives; what a killed one has left is removed."""

    def __init__(self, folder: Path, name: str, count: int, size: int) -> None:
        remove_leftovers(folder)
        free = shutil.disk_usage(folder).free
        if count * size > free:
            raise BackplaneError(
                f"the second KV tier may take {count * size} bytes per worker in {folder}, and {free} are free there; "
                "lower 'capacity', or name another 'folder'"
            )
        self._size = size
        self.path = folder / f"{_PREFIX}{os.getpid()}-{name}{_SUFFIX}"
        # Prompts can be read off it.
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
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
                raise OSError(f"{self.path} ends at {slot * self._size + place}, in the middle of a block")
            place += done
        return row

    def close(self) -> None:
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def describe(self) -> str:
        return str(self.path)


def remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            file = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # its owner lives
            continue
        finally:
            os.close(file)
