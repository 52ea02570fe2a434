"""Implements the file by which a process publishes numbers to another: names once, then an array of float64.

The writer replaces the array with one `pwrite` per step. The reader reads the whole file. Neither maps it into memory:
an access to a mapping whose file was truncated, or has no space on its disk, would end the process with SIGBUS.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_backplane.errors import BackplaneError, short_repr
from vllm_backplane.metrics.series import METRICS, Series

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only

MAGIC = b"BPVALUE1"
_HEAD = struct.Struct("=8sII")
"""The magic bytes, the number of series and the bytes of their names in JSON. Names and values follow."""
LARGEST = 1 << 20
"""Bytes of the largest file that is read."""


class ValuesFile:
    """Publishes the values of some series. Counting changes `values`, and `save` makes all of them visible."""

    def __init__(self, path: Path, series: Sequence[Series]) -> None:
        self.path = path
        self.places = {one: place for place, one in enumerate(series)}
        self.values = array("d", bytes(8 * len(series)))
        names = json.dumps(series).encode()
        names += b" " * (-(_HEAD.size + len(names)) % 8)  # the values are aligned
        self._offset = _HEAD.size + len(names)
        unfinished = path.with_name(f".{path.name}")
        unfinished.unlink(missing_ok=True)
        self._descriptor: int | None = os.open(
            unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        os.pwrite(self._descriptor, _HEAD.pack(MAGIC, len(series), len(names)) + names + bytes(self.values), 0)
        unfinished.replace(path)  # a reader finds a complete file or none

    @classmethod
    def created(cls, path: Path, series: Sequence[Series]) -> ValuesFile | None:
        """Returns a new file, or None if it cannot be created, which is logged: a server runs without metrics."""
        try:
            return cls(path, series)
        except OSError as fault:
            logger.error("The metrics in %s are left out: %s", path, fault)
            return None

    def save(self) -> None:
        """Publishes the values. If they cannot be written, logs that once, and later calls do nothing."""
        if self._descriptor is None:
            return
        try:
            os.pwrite(self._descriptor, self.values, self._offset)
        except OSError as fault:
            logger.error("The metrics in %s stay as they are: %s", self.path, fault)
            self._close()

    def remove(self) -> None:
        """Removes the file at the end of its process."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read(path: Path) -> list[tuple[Series, float]]:
    """Returns the series of a file with their values; raises a BackplaneError if the file is not a complete one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        content = file.read(LARGEST + 1)
    try:
        return list(_parsed(content))
    except ValueError as fault:
        raise BackplaneError(
            f"{path} has no metrics of this release ({fault}); remove it, or start the server again"
        ) from fault


def _parsed(content: bytes) -> Iterator[tuple[Series, float]]:
    if len(content) < _HEAD.size or len(content) > LARGEST:
        raise ValueError(f"{len(content)} bytes")
    magic, count, length = _HEAD.unpack_from(content)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    if len(content) != _HEAD.size + length + 8 * count:
        raise ValueError(f"{len(content)} bytes instead of {_HEAD.size + length + 8 * count}")
    names = json.loads(content[_HEAD.size : _HEAD.size + length])
    if not isinstance(names, list) or len(names) != count:
        raise ValueError(f"not the names of {count} series")
    values = struct.unpack_from(f"={count}d", content, _HEAD.size + length)
    for name, value in zip(names, values, strict=True):
        yield _series(name), value


def _series(found: object) -> Series:
    if isinstance(found, list) and len(found) == 2 and isinstance(found[0], str) and isinstance(found[1], list):
        metric, labels = found
        expected = METRICS[metric].labels if metric in METRICS else ()
        if len(labels) == len(expected) and expected and all(isinstance(label, str) for label in labels):
            return metric, tuple(labels)
    raise ValueError(f"an unknown series {short_repr(found)}")
