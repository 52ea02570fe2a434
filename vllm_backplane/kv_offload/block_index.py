"""Which block lies in which slot of the tier. Slots are equal, so their number is the bound on what is kept."""

from __future__ import annotations

from collections import Counter, OrderedDict


class BlockIndex:
    """Keys by the time of their last use. A slot that is being read is pinned and not given to another block."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.evicted = 0
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        self._freed_when_unpinned: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: bytes) -> int | None:
        return self._held.get(key)

    def touch(self, key: bytes) -> None:
        self._held.move_to_end(key)

    def place(self, key: bytes) -> int | None:
        """A slot for a block that is not held, in place of the one used longest ago; None if all are pinned."""
        if not self._free and not self._evict():
            return None
        slot = self._held[key] = self._free.pop()
        return slot

    def _evict(self) -> bool:
        for key, slot in self._held.items():
            if not self._pins[slot]:
                self.evicted += 1
                self.drop(key)
                return True
        return False

    def drop(self, key: bytes) -> None:
        slot = self._held.pop(key, None)
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
        for key in list(self._held):
            self.drop(key)
