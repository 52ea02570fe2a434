"""Maps the keys of offloaded blocks to slots, with least-recently-used eviction.

All slots have the same size, so their number bounds the memory that is used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict


class BlockIndex:
    """Maps block keys to slots, in order of last use. A slot that is being read is pinned and not reused."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.evicted = 0
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        self._freed_when_unpinned: set[int] = set()

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, key: bytes) -> int | None:
        return self._slot_of.get(key)

    def touch(self, key: bytes) -> None:
        """Marks a block as the most recently used one."""
        self._slot_of.move_to_end(key)

    def allocate(self, key: bytes) -> int | None:
        """Assigns a slot to a block that has none, and evicts the least recently used block if no slot is free. Returns
        None if all slots are pinned."""
        if not self._free and not self._evict():
            return None
        slot = self._slot_of[key] = self._free.pop()
        return slot

    def _evict(self) -> bool:
        for key, slot in self._slot_of.items():
            if not self._pins[slot]:
                self.evicted += 1
                self.remove(key)
                return True
        return False

    def remove(self, key: bytes) -> None:
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return
        if self._pins[slot]:
            self._freed_when_unpinned.add(slot)
        else:
            self._free.append(slot)

    def pin(self, slot: int) -> None:
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if self._pins[slot] > 0:
            return
        del self._pins[slot]
        if slot in self._freed_when_unpinned:
            self._freed_when_unpinned.remove(slot)
            self._free.append(slot)

    def clear(self) -> None:
        for key in list(self._slot_of):
            self.remove(key)
