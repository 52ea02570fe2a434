"""The workers' side: blocks go from the KV cache into the tier as they are complete, and back when they are asked for.

Reading and checking is done by a thread of its own, while steps go on; the KV cache is touched by the worker's thread
alone. A request waits until all its blocks are in place. What cannot be had is named, and vLLM computes it.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from vllm_backplane.kv_tier.orders import Load, Orders, Piece
from vllm_backplane.kv_tier.outcomes import Outcome
from vllm_backplane.kv_tier.pages import Pages
from vllm_backplane.kv_tier.slots import Bytes
from vllm_backplane.kv_tier.store import BlockStore, Unusable

STAGED_BLOCKS = 64
"""Blocks that are read ahead of the KV cache at most."""
IDLE_SECONDS = 0.005
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Arrival:
    request_id: str
    block_id: int
    row: Bytes | None
    outcome: Outcome
    last: bool


class Carrier:
    def __init__(self, pages: Pages, store: BlockStore, tell: Tell) -> None:
        self._pages = pages
        self._store = store
        self._tell = tell
        self.counts: Counter[Outcome] = Counter()
        self.failed_blocks: set[int] = set()
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._arrivals: queue.Queue[_Arrival | BaseException] = queue.Queue(STAGED_BLOCKS)
        self._under_way = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kv-tier-loads", daemon=True)
        self._thread.start()

    # --- by the worker's thread -----------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        if orders.forget:
            self._store.clear()

    def load(self, orders: Orders) -> None:
        for load in orders.loads:
            self._under_way += 1
            self._loads.put(load)

    def save(self, orders: Orders) -> None:
        for save in orders.saves:
            row = self._pages.read(save.block_id)
            try:
                self._store.write(save.key, save.slot, row)
            except OSError as error:
                self.counts[Outcome.UNWRITTEN] += 1
                self._tell(f"a block is not kept: {error}")
            else:
                self.counts[Outcome.STORED] += 1

    def arrived(self, idle: bool) -> set[str]:
        """Puts what was read into the KV cache; the requests that have all they can have."""
        complete: set[str] = set()
        wait = idle and self._under_way > 0
        while self._under_way:
            try:
                arrival = self._arrivals.get(wait, IDLE_SECONDS) if wait else self._arrivals.get_nowait()
            except queue.Empty:
                break
            wait = False
            if isinstance(arrival, BaseException):
                raise arrival
            self.counts[arrival.outcome] += 1
            if arrival.row is None:
                self.failed_blocks.add(arrival.block_id)
            else:
                self._pages.write(arrival.block_id, arrival.row)
            if arrival.last:
                self._under_way -= 1
                complete.add(arrival.request_id)
        return complete

    def take_failed_blocks(self) -> set[int]:
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, Counter()
        return {outcome.value: count for outcome, count in counts.items()}

    def forget(self) -> None:
        """Weights have changed: nothing that was computed with the old ones may come back."""
        self._store.clear()

    def close(self) -> None:
        self._closing.set()
        self._loads.put(None)
        self._thread.join(10)
        self._store.close()

    # --- by the reading thread ------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (load := self._loads.get()) is not None:
                reasons: list[str] = []
                for number, piece in enumerate(load.pieces, 1):
                    last = number == len(load.pieces)
                    row, outcome = self._fetch(piece, reasons)
                    if not self._hand_over(_Arrival(load.request_id, piece.block_id, row, outcome, last)):
                        return
                if reasons:
                    failed = f"{len(reasons)} of {len(load.pieces)} blocks of the second KV tier"
                    self._tell(f"{failed} are computed again; the first: {reasons[0]}")
        except BaseException as error:  # raised again by the worker's thread, or requests would wait for ever
            self._hand_over(error)

    def _fetch(self, piece: Piece, reasons: list[str]) -> tuple[Bytes | None, Outcome]:
        try:
            return self._store.read(piece.key), Outcome.LOADED
        except Unusable as reason:
            reasons.append(str(reason))
            return None, reason.outcome

    def _hand_over(self, arrival: _Arrival | BaseException) -> bool:
        """Whether it was taken; not if the carrier is closed first."""
        while not self._closing.is_set():
            try:
                self._arrivals.put(arrival, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False
