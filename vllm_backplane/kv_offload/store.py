"""Blocks in slots, each with a checksum that is kept apart from them and compared before a block is used."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy

from vllm_backplane.kv_offload.slots import Bytes, Slots


class Outcome(Enum):
    STORED = "stored"
    UNWRITTEN = "unwritten"
    """The disk refused it."""
    LOADED = "loaded"
    FETCHED = "fetched"
    """From another server."""
    DAMAGED = "damaged"
    """It was there, and not as it was written."""
    MISSING = "missing"
    UNREACHABLE = "unreachable"
    """Another server said that it has it, and did not send it."""
    EVICTED = "evicted"
    """Others were used later, and the bound was reached."""


class Unusable(Exception):
    """A block cannot be had; it is computed instead. The text says why."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def checksum(key: bytes, row: Bytes) -> bytes:
    """Of a block's bytes and of which block it is."""
    digest = hashlib.blake2b(key, digest_size=16)
    digest.update(row.data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class _Entry:
    slot: int
    checksum: bytes


class BlockStore:
    """Thread-safe: one thread writes, others read."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._entries: dict[bytes, _Entry] = {}
        self._in_slot: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def write(self, key: bytes, slot: int, row: Bytes) -> None:
        """Raises OSError if the disk does; the block is not there then."""
        with self._lock:
            self._forget_slot(slot)
            before = self._entries.pop(key, None)
            if before is not None:
                self._in_slot.pop(before.slot, None)
        self._slots.write(slot, row)
        with self._lock:
            self._entries[key] = _Entry(slot, checksum(key, row))
            self._in_slot[slot] = key

    def read(self, key: bytes) -> Bytes:
        """The bytes that were written for `key`, or an error. They may lie in the slot itself."""
        return self._checked(key, lambda row: row)[1]

    def copy(self, key: bytes) -> tuple[bytes, Bytes]:
        """Checksum and bytes for another thread than the one that orders slots to be written: the slot may be written
        while it is read, which the checksum shows."""
        return self._checked(key, numpy.copy)

    def _checked(self, key: bytes, taken: Callable[[Bytes], Bytes]) -> tuple[bytes, Bytes]:
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            raise Unusable(Outcome.MISSING, "it is not there")
        try:
            row = taken(self._slots.read(entry.slot))
        except OSError as error:
            self._forget(key, entry)
            raise Unusable(
                Outcome.DAMAGED, f"slot {entry.slot} of {self._slots.describe()} cannot be read: {error}"
            ) from error
        if checksum(key, row) != entry.checksum:
            self._forget(key, entry)
            raise Unusable(
                Outcome.DAMAGED, f"slot {entry.slot} of {self._slots.describe()} does not hold what was written"
            )
        return entry.checksum, row

    def first_held(self, keys: Sequence[bytes]) -> int:
        """How many keys are there, from the first to the last before one that is not."""
        with self._lock:
            return next((place for place, key in enumerate(keys) if key not in self._entries), len(keys))

    def _forget(self, key: bytes, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) == entry:
                del self._entries[key]
                self._in_slot.pop(entry.slot, None)

    def _forget_slot(self, slot: int) -> None:
        key = self._in_slot.pop(slot, None)
        if key is not None:
            self._entries.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._in_slot.clear()

    def close(self) -> None:
        self.clear()
        self._slots.close()

    def describe(self) -> str:
        return self._slots.describe()
