"""Saves, on the worker side of KV offload, complete blocks from the KV cache to the store, and loads requested blocks.

A separate thread reads and verifies blocks while steps go on. Only the worker's own thread accesses the KV cache. A
request waits until all its blocks are in place. Blocks that cannot be loaded are reported, and vLLM computes them.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_backplane.kv_offload.blocks_client import BlockClient
from vllm_backplane.kv_offload.cache_rows import CacheRows
from vllm_backplane.kv_offload.metadata import BlockLoad, RequestLoad, StepMetadata
from vllm_backplane.kv_offload.slots import Bytes
from vllm_backplane.kv_offload.store import BlockStore, BlockUnavailable, Outcome

MAX_STAGED_BLOCKS = 64
"""Blocks that may have been read and not yet copied into the KV cache."""
IDLE_SECONDS = 0.005
"""Seconds for which a step that computes nothing waits for a block."""


@dataclass(frozen=True, slots=True)
class _StagedBlock:
    """Holds a block that was read, or could not be read, for a request."""

    request_id: str
    block_id: int
    row: Bytes | None
    """The bytes of the block; None if it is not available."""
    outcome: Outcome
    last: bool
    """Whether it is the last block of the request."""
    generation: int


class OffloadWorker:
    """Saves and loads the blocks of one worker, as the scheduler side has planned."""

    def __init__(
        self, cache: CacheRows, store: BlockStore, peer: BlockClient | None, warn: Callable[[str], None]
    ) -> None:
        self.cache = cache
        self.store = store
        self._peer = peer
        self._warn = warn
        self.counts: Counter[Outcome] = Counter()
        self.failed_blocks: set[int] = set()
        self._loads: queue.SimpleQueue[tuple[int, RequestLoad] | None] = queue.SimpleQueue()
        self._staged: queue.Queue[_StagedBlock | BaseException] = queue.Queue(MAX_STAGED_BLOCKS)
        self._loaded: dict[str, list[int]] = {}
        """IDs of the blocks that are in the KV cache already, by request that still waits for others."""
        self._generation = 0
        """Number of resets. Blocks of an earlier generation must not be used."""
        self.weights_since: int | None = 0
        """The first step with the present weights. None while they are being replaced, and until the next step."""
        self._replacing_weights = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-offload-loads", daemon=True)
        self._thread.start()

    # --- called by the worker's thread ----------------------------------------------------------------------------

    def begin_step(self, metadata: StepMetadata) -> None:
        if self.weights_since is None and not self._replacing_weights:
            self.weights_since = metadata.number
        if metadata.reset:
            self.reset()

    def start_loads(self, metadata: StepMetadata) -> None:
        for load in metadata.loads:
            self._loaded[load.request_id] = []
            self._loads.put((self._generation, load))

    def save_blocks(self, metadata: StepMetadata) -> None:
        if self.weights_since is None or metadata.weights_since != self.weights_since:
            return  # the scheduler did not know these weights, so it may have planned blocks of other weights
        for save in metadata.saves:
            row = self.cache.read(save.block_id)
            try:
                self.store.write(save.key, save.slot, row)
            except OSError as error:
                self.counts[Outcome.UNWRITTEN] += 1
                self._warn(f"KV offload could not store a block: {error}")
            else:
                self.counts[Outcome.STORED] += 1

    def finish_loads(self, idle: bool) -> set[str]:
        """Copies staged blocks into the KV cache. Returns the requests whose loads have finished, with or without
        failed blocks. If the step is idle, waits briefly for the first block."""
        finished: set[str] = set()
        wait = idle
        while self._loaded:
            try:
                block = self._staged.get(wait, IDLE_SECONDS) if wait else self._staged.get_nowait()
            except queue.Empty:
                break
            wait = False
            if isinstance(block, BaseException):
                raise block
            if block.row is None or block.generation != self._generation:
                self.failed_blocks.add(block.block_id)
                self.counts[block.outcome if block.row is None else Outcome.MISSING] += 1
            else:
                self.cache.write(block.block_id, block.row)
                self._loaded[block.request_id].append(block.block_id)
                self.counts[block.outcome] += 1
            if block.last:
                del self._loaded[block.request_id]
                finished.add(block.request_id)
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Returns the IDs of blocks that could not be loaded since the last call."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        """Returns the numbers of blocks by outcome since the last call."""
        counts, self.counts = self.counts, Counter()
        return {outcome.value: count for outcome, count in counts.items()}

    def reset(self) -> None:
        """Discards all blocks, because their content has become invalid: those in the store, those being read, and
        those that waiting requests have in the KV cache already, which are reported as failed."""
        self.store.clear()
        self._generation += 1
        for blocks in self._loaded.values():
            self.failed_blocks.update(blocks)
            blocks.clear()

    def begin_weight_change(self) -> None:
        """Discards all blocks, and saves none until the scheduler knows the step from which on the new weights are in
        use."""
        self.reset()
        self.weights_since = None
        self._replacing_weights = True

    def end_weight_change(self) -> None:
        """Discards what has been requested meanwhile. The next step is the first with the new weights."""
        self.reset()
        self._replacing_weights = False

    def close(self) -> None:
        self._closing.set()
        self._loads.put(None)
        self._thread.join(10)
        self.store.close()

    # --- the reading thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (item := self._loads.get()) is not None:
                generation, load = item
                failures: list[BlockUnavailable] = []
                for number, (block, found) in enumerate(zip(load.blocks, self._read(load.blocks), strict=True), 1):
                    last = number == len(load.blocks)
                    if isinstance(found, BlockUnavailable):
                        failures.append(found)
                        staged = _StagedBlock(load.request_id, block.block_id, None, found.outcome, last, generation)
                    else:
                        outcome = Outcome.FETCHED if block.from_peer else Outcome.LOADED
                        staged = _StagedBlock(load.request_id, block.block_id, found, outcome, last, generation)
                    if not self._stage(staged):
                        return
                if failures:
                    self._warn(
                        f"KV offload could not load {len(failures)} of {len(load.blocks)} blocks, which are computed. "
                        f"Reason for the first: {failures[0]}"
                    )
        except BaseException as error:  # raised again in the worker's thread; otherwise requests would wait for ever
            self._stage(error)

    def _read(self, blocks: Sequence[BlockLoad]) -> Iterator[Bytes | BlockUnavailable]:
        """Yields the bytes of each block, or why it is not available. Blocks from the peer are last."""
        for block in blocks:
            if not block.from_peer:
                try:
                    yield self.store.read(block.key)
                except BlockUnavailable as reason:
                    yield reason
        remote = [block.key for block in blocks if block.from_peer]
        if remote:
            if self._peer is None:
                raise AssertionError("blocks from a peer were planned, but there is no peer")
            yield from self._peer.fetch(remote, self.cache.row_bytes)

    def _stage(self, block: _StagedBlock | BaseException) -> bool:
        """Queues a block for the worker's thread. Returns False if the worker is closed before there is room."""
        while not self._closing.is_set():
            try:
                self._staged.put(block, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False
