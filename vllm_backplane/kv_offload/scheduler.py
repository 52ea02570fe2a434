"""Decides, on the scheduler side of KV offload, which blocks a request loads instead of computing, and which are saved.

The scheduler alone assigns slots to blocks, and every worker follows, so the workers hold the same blocks without
communication. A block counts as stored from the step on that saves it, because workers execute steps in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from vllm_backplane.kv_offload.block_index import BlockIndex
from vllm_backplane.kv_offload.block_keys import KeyChain
from vllm_backplane.kv_offload.block_origins import BlockOrigins
from vllm_backplane.kv_offload.blocks_client import BlockClient
from vllm_backplane.kv_offload.metadata import BlockLoad, BlockSave, RequestLoad, StepMetadata

logger = init_logger("vllm." + __name__)

PEER_RESULT_SECONDS = 1.0
"""Seconds for which the peer's response is reused. vLLM queries a request that cannot be scheduled yet in every
step."""


@dataclass(slots=True)
class _TrackedRequest:
    """Tracks a request whose blocks are saved."""

    request: Any
    keys: KeyChain
    num_local_tokens: int = 0
    """Tokens that vLLM's own prefix cache held at the last query."""
    block_ids: list[int] = field(default_factory=list)
    num_handled_blocks: int = 0
    """Blocks that have been saved, or found among the stored ones."""
    peer_result: tuple[int, int, float] = (0, 0, 0.0)
    """The last query of the peer: index of its first block, how many blocks the peer has from there, and when."""


@dataclass(frozen=True, slots=True)
class _PendingLoad:
    """Describes a load that has not finished, and the slots that it pins."""

    blocks: tuple[BlockLoad, ...]
    slots: tuple[int, ...]


def can_offload(request: Any) -> bool:
    """Returns whether tokens and salt alone determine the content of a request's blocks.

    The name of a LoRA adapter may come to mean another adapter; images and embeddings are not tokens; a request whose
    input arrives in parts may take tokens back. Such requests run as without KV offload.
    """
    return (
        request.lora_request is None
        and not request.mm_features
        and request.prompt_embeds is None
        and not request.resumable
    )


class OffloadScheduler:
    """Plans the loads and saves of each step, and keeps the index of stored blocks."""

    def __init__(self, block_size: int, peer: BlockClient | None = None) -> None:
        self._peer = peer
        self._block_size = block_size
        self._index = BlockIndex(0)
        self._requests: dict[str, _TrackedRequest] = {}
        self._pending_loads: dict[str, _PendingLoad] = {}
        self._metadata = StepMetadata(number=1)
        self._origins = BlockOrigins(block_size)
        self._weights_since: int | None = 0
        """The first step with the present weights. None while weights are being replaced."""
        self._warned_of_old_blocks = False

    def set_slots(self, slots: int) -> None:
        """Sets the number of slots, which every worker has. vLLM reports it again when the workers have slept."""
        if slots != self._index.slots:
            self._index = BlockIndex(slots)

    # --- before a request runs ------------------------------------------------------------------------------------

    def num_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """Returns how many tokens after the computed ones can be loaded: first from the store, then from the peer. The
        last token is always computed, because its logits are needed."""
        if not can_offload(request):
            return 0
        first, end = num_computed_tokens // self._block_size, (request.num_tokens - 1) // self._block_size
        tracked = self._track(request)
        tracked.num_local_tokens = num_computed_tokens
        # The request needs an output for every token of its prompt (prompt logprobs). vLLM checks it from 0.31 on.
        if request.skip_reading_prefix_cache:
            return 0
        keys = tracked.keys.up_to(request.all_token_ids, end)
        matched = first
        while matched < end and self._index.find(keys[matched]) is not None:
            matched += 1
        if self._peer is not None and matched < end:
            matched += self._count_at_peer(self._peer, tracked, keys, matched)
        return max(matched - first, 0) * self._block_size

    def _count_at_peer(self, peer: BlockClient, tracked: _TrackedRequest, keys: Sequence[bytes], first: int) -> int:
        queried_first, count, when = tracked.peer_result
        if queried_first != first or time.monotonic() - when > PEER_RESULT_SECONDS:
            count = peer.count_stored(keys[first:])
            tracked.peer_result = (first, count, time.monotonic())
        return count

    def _track(self, request: Any) -> _TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = _TrackedRequest(request, KeyChain(self._block_size, request.cache_salt))
            self._requests[request.request_id] = tracked
        return tracked

    def plan_load(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Plans the load of `num_external_tokens` tokens into `block_ids`, after the tokens that were computed at the
        last call of `num_matched_tokens`."""
        if not num_external_tokens:
            return
        tracked = self._track(request)
        first = tracked.num_local_tokens // self._block_size
        end = first + num_external_tokens // self._block_size
        keys = tracked.keys.up_to(request.all_token_ids, end)
        blocks: list[BlockLoad] = []
        slots: list[int] = []
        for index in range(first, end):
            slot = None if blocks and blocks[-1].from_peer else self._index.find(keys[index])
            blocks.append(BlockLoad(keys[index], block_ids[index], from_peer=slot is None))
            if slot is not None:
                self._index.touch(keys[index])
                self._index.pin(slot)
                slots.append(slot)
        if blocks[-1].from_peer and self._peer is None:
            raise AssertionError(f"blocks of {request.request_id} were matched, but are not stored")
        self._pending_loads[request.request_id] = _PendingLoad(tuple(blocks), tuple(slots))
        self._metadata.loads.append(RequestLoad(request.request_id, tuple(blocks)))
        self._origins.load((block.block_id for block in blocks), self._metadata.number)

    # --- every step -----------------------------------------------------------------------------------------------

    def build_metadata(self, output: Any) -> StepMetadata:
        """Returns the loads and saves of a step, from vLLM's SchedulerOutput."""
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids[0], new.num_computed_tokens)
            self._plan_saves(new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for request_id, added, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            block_ids = added[0] if added else ()
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, block_ids, num_computed_tokens)
            else:
                self._origins.extend(request_id, block_ids)
                if request_id in self._requests:
                    self._requests[request_id].block_ids.extend(block_ids)
            self._plan_saves(request_id, num_computed_tokens + output.num_scheduled_tokens[request_id])
        metadata, self._metadata = self._metadata, StepMetadata(number=self._metadata.number + 1)
        metadata.weights_since = self._weights_since
        metadata.idle = output.total_num_scheduled_tokens == 0
        return metadata

    def _begin(self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Records the blocks of a request that begins, or that begins again after it was preempted."""
        origin = self._origins.begin(request_id, block_ids, num_computed_tokens, self._metadata.number)
        if request_id in self._requests:
            self._requests[request_id].block_ids = list(block_ids)
        if self._weights_since is not None and origin < self._weights_since and not self._warned_of_old_blocks:
            self._warned_of_old_blocks = True
            logger.warning(
                "KV offload does not save blocks of requests that begin with blocks of other weights, which are still "
                "in vLLM's prefix cache; reset it when weights have been replaced (reset_prefix_cache)."
            )

    def _plan_saves(self, request_id: str, num_computed_tokens: int) -> None:
        """Plans the saves of blocks that are full after the step, when the KV cache has `num_computed_tokens` tokens.
        Draft tokens among them may be rejected, so only tokens that the request already has count. Blocks that depend
        on other weights are not saved."""
        tracked = self._requests.get(request_id)
        if tracked is None or self._weights_since is None or self._origins.of_request(request_id) < self._weights_since:
            return
        full = min(num_computed_tokens, tracked.request.num_tokens) // self._block_size
        if full <= tracked.num_handled_blocks:
            return
        keys = tracked.keys.up_to(tracked.request.all_token_ids, full)
        for index in range(tracked.num_handled_blocks, full):
            if self._index.find(keys[index]) is not None:
                self._index.touch(keys[index])
            elif (slot := self._index.allocate(keys[index])) is not None:
                self._metadata.saves.append(BlockSave(keys[index], slot, tracked.block_ids[index]))
        tracked.num_handled_blocks = full

    # --- results of the workers -----------------------------------------------------------------------------------

    def handle_failed_blocks(self, block_ids: set[int]) -> None:
        """Removes blocks that could not be loaded from the index. They are saved again when they have been computed."""
        for request_id, load in self._pending_loads.items():
            for block in load.blocks:
                if block.block_id in block_ids:
                    self._index.remove(block.key)
                    if request_id in self._requests:
                        self._requests[request_id].num_handled_blocks = 0
                        self._requests[request_id].peer_result = (0, 0, 0.0)
                    if block.from_peer and self._peer is not None:
                        self._peer.back_off()

    def finish_loads(self, request_ids: Iterable[str]) -> None:
        """Unpins the slots of loads that have finished."""
        for request_id in request_ids:
            load = self._pending_loads.pop(request_id)
            for slot in load.slots:
                self._index.unpin(slot)

    def request_finished(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._origins.end(request_id)

    def reset(self) -> None:
        """Discards all stored blocks, and stops saving those of running requests, which depend on discarded ones."""
        self._index.clear()
        self._requests.clear()
        self._metadata.reset = True
        self._metadata.saves.clear()

    def set_weights(self, since: int | None) -> None:
        """Sets the first step with the present weights, as the workers report it; None while weights are being
        replaced. If it is another one, the index is cleared, as the workers have cleared their stores. Requests that
        depend on no earlier step are saved from their first block on, because the workers have not saved them yet."""
        if since == self._weights_since:
            return
        self._weights_since = since
        self._warned_of_old_blocks = False
        self._index.clear()
        for tracked in self._requests.values():
            tracked.num_handled_blocks = 0
            tracked.peer_result = (0, 0, 0.0)

    def take_evicted(self) -> int:
        """Returns how many blocks were evicted since the last call."""
        evicted, self._index.evicted = self._index.evicted, 0
        return evicted
