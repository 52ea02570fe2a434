"""The workers' side: blocks go from the KV cache into the tier as they are complete, and back when they are asked for.

Reading and checking is done by a thread of its own, while steps go on; the KV cache is touched by the worker's thread
alone. A request waits until all its blocks are in place. What cannot be had is named, and vLLM computes it.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_backplane.kv_offload.cache_rows import Pages
from vllm_backplane.kv_offload.metadata import Load, Orders, Piece
from vllm_backplane.kv_offload.peer_client import Peer
from vllm_backplane.kv_offload.slots import Bytes
from vllm_backplane.kv_offload.store import BlockStore, Outcome, Unusable

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
    era: int


class Carrier:
    def __init__(self, pages: Pages, store: BlockStore, peer: Peer | None, tell: Tell) -> None:
        self.pages = pages
        self.store = store
        self._peer = peer
        self._tell = tell
        self.counts: Counter[Outcome] = Counter()
        self.failed_blocks: set[int] = set()
        self._loads: queue.SimpleQueue[tuple[int, Load] | None] = queue.SimpleQueue()
        self._arrivals: queue.Queue[_Arrival | BaseException] = queue.Queue(STAGED_BLOCKS)
        self._placed: dict[str, list[int]] = {}
        """The blocks that are in the KV cache already, by request that still waits for others."""
        self._era = 0
        """Ends when all that was computed becomes void."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kv-tier-loads", daemon=True)
        self._thread.start()

    # --- by the worker's thread -----------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        if orders.forget:
            self.forget()

    def load(self, orders: Orders) -> None:
        for load in orders.loads:
            self._placed[load.request_id] = []
            self._loads.put((self._era, load))

    def save(self, orders: Orders) -> None:
        for save in orders.saves:
            row = self.pages.read(save.block_id)
            try:
                self.store.write(save.key, save.slot, row)
            except OSError as error:
                self.counts[Outcome.UNWRITTEN] += 1
                self._tell(f"a block is not kept: {error}")
            else:
                self.counts[Outcome.STORED] += 1

    def arrived(self, idle: bool) -> set[str]:
        """Puts what was read into the KV cache; the requests that have all they can have."""
        complete: set[str] = set()
        wait = idle
        while self._placed:
            try:
                arrival = self._arrivals.get(wait, IDLE_SECONDS) if wait else self._arrivals.get_nowait()
            except queue.Empty:
                break
            wait = False
            if isinstance(arrival, BaseException):
                raise arrival
            if arrival.row is None or arrival.era != self._era:
                self.failed_blocks.add(arrival.block_id)
                self.counts[arrival.outcome if arrival.row is None else Outcome.MISSING] += 1
            else:
                self.pages.write(arrival.block_id, arrival.row)
                self._placed[arrival.request_id].append(arrival.block_id)
                self.counts[arrival.outcome] += 1
            if arrival.last:
                del self._placed[arrival.request_id]
                complete.add(arrival.request_id)
        return complete

    def take_failed_blocks(self) -> set[int]:
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, Counter()
        return {outcome.value: count for outcome, count in counts.items()}

    def forget(self) -> None:
        """Weights have changed: nothing that was computed with the old ones may come back, nor count where it has."""
        self.store.clear()
        self._era += 1
        for blocks in self._placed.values():
            self.failed_blocks.update(blocks)
            blocks.clear()

    def close(self) -> None:
        self._closing.set()
        self._loads.put(None)
        self._thread.join(10)
        self.store.close()

    # --- by the reading thread ------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (given := self._loads.get()) is not None:
                era, load = given
                reasons: list[Unusable] = []
                for number, (piece, found) in enumerate(zip(load.pieces, self._find(load.pieces), strict=True), 1):
                    last = number == len(load.pieces)
                    if isinstance(found, Unusable):
                        reasons.append(found)
                        arrival = _Arrival(load.request_id, piece.block_id, None, found.outcome, last, era)
                    else:
                        outcome = Outcome.FETCHED if piece.from_peer else Outcome.LOADED
                        arrival = _Arrival(load.request_id, piece.block_id, found, outcome, last, era)
                    if not self._hand_over(arrival):
                        return
                if reasons:
                    failed = f"{len(reasons)} of {len(load.pieces)} blocks that were to be loaded"
                    self._tell(f"{failed} are computed; the first because: {reasons[0]}")
        except BaseException as error:  # raised again by the worker's thread, or requests would wait for ever
            self._hand_over(error)

    def _find(self, pieces: Sequence[Piece]) -> Iterator[Bytes | Unusable]:
        for piece in pieces:
            if not piece.from_peer:
                try:
                    yield self.store.read(piece.key)
                except Unusable as reason:
                    yield reason
        elsewhere = [piece.key for piece in pieces if piece.from_peer]
        if elsewhere:
            if self._peer is None:
                raise AssertionError("blocks of another server are asked for, and there is none")
            yield from self._peer.blocks(elsewhere, self.pages.row_bytes)

    def _hand_over(self, arrival: _Arrival | BaseException) -> bool:
        """Whether it was taken; not if the carrier is closed first."""
        while not self._closing.is_set():
            try:
                self._arrivals.put(arrival, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False
