"""Stores blocks in slots, each with a checksum that is kept in memory and verified before the block is used."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy

from vllm_backplane.kv_offload.slots import Bytes, Slots


class Outcome(Enum):
    """Names what happened to a block. The values are label values of the metric."""

    STORED = "stored"
    UNWRITTEN = "unwritten"
    """The disk returned an error."""
    LOADED = "loaded"
    FETCHED = "fetched"
    """Received from another server."""
    DAMAGED = "damaged"
    """The slot could not be read, or its bytes did not match the checksum."""
    MISSING = "missing"
    UNREACHABLE = "unreachable"
    """Another server reported that it has the block, and did not send it."""
    EVICTED = "evicted"
    """Removed as the least recently used block, because all slots were in use."""


class BlockUnavailable(Exception):
    """Reports that a block cannot be loaded, so that it is computed instead. The message is the reason."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def checksum(key: bytes, row: Bytes) -> bytes:
    """Returns a checksum of a block's key and bytes, which also detects the bytes of another block."""
    digest = hashlib.blake2b(key, digest_size=16)
    digest.update(row.data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class _Entry:
    slot: int
    checksum: bytes


class BlockStore:
    """Stores blocks by key. It is thread-safe for one writing thread and any number of reading threads."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._entries: dict[bytes, _Entry] = {}
        self._key_in_slot: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def write(self, key: bytes, slot: int, row: Bytes) -> None:
        """Stores a block in a slot, in place of what the slot held. Raises OSError if the disk does; the block is then
        not stored."""
        with self._lock:
            self._remove_slot(slot)
            previous = self._entries.pop(key, None)
            if previous is not None:
                self._key_in_slot.pop(previous.slot, None)
        self._slots.write(slot, row)
        with self._lock:
            self._entries[key] = _Entry(slot, checksum(key, row))
            self._key_in_slot[slot] = key

    def read(self, key: bytes) -> Bytes:
        """Returns the bytes of a block, possibly as a view of the slot itself. Raises BlockUnavailable."""
        return self._read_verified(key, lambda row: row)[1]

    def read_copy(self, key: bytes) -> tuple[bytes, Bytes]:
        """Returns the checksum and a copy of the bytes of a block, for a thread other than the one that schedules
        writes. If the slot is written during the copy, the checksum does not match, and BlockUnavailable is raised."""
        return self._read_verified(key, numpy.copy)

    def _read_verified(self, key: bytes, take: Callable[[Bytes], Bytes]) -> tuple[bytes, Bytes]:
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            raise BlockUnavailable(Outcome.MISSING, "it is not stored")
        try:
            row = take(self._slots.read(entry.slot))
        except OSError as error:
            self._remove(key, entry)
            raise BlockUnavailable(
                Outcome.DAMAGED, f"slot {entry.slot} of {self._slots.describe()} cannot be read: {error}"
            ) from error
        if checksum(key, row) != entry.checksum:
            self._remove(key, entry)
            raise BlockUnavailable(
                Outcome.DAMAGED, f"the content of slot {entry.slot} of {self._slots.describe()} fails its checksum"
            )
        return entry.checksum, row

    def count_stored(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the first keys are stored, up to the first that is not."""
        with self._lock:
            return next((index for index, key in enumerate(keys) if key not in self._entries), len(keys))

    def _remove(self, key: bytes, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) == entry:
                del self._entries[key]
                self._key_in_slot.pop(entry.slot, None)

    def _remove_slot(self, slot: int) -> None:
        key = self._key_in_slot.pop(slot, None)
        if key is not None:
            self._entries.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._key_in_slot.clear()

    def close(self) -> None:
        self.clear()
        self._slots.close()

    def describe(self) -> str:
        return self._slots.describe()
