"""The scheduler's side: which blocks a request need not compute, and which are kept.

It alone decides what lies in which slot, and every worker follows, so the workers agree without talking. A block counts
as kept from the step on that saves it: workers carry out steps in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_backplane.kv_offload.block_index import BlockIndex
from vllm_backplane.kv_offload.block_keys import KeyChain
from vllm_backplane.kv_offload.metadata import Load, Orders, Piece, Save
from vllm_backplane.kv_offload.peer_client import Peer

ANSWER_HOLDS_SECONDS = 1.0
"""vLLM asks again at every step for a request that finds no room."""


@dataclass(slots=True)
class _Followed:
    """A request whose blocks are kept."""

    request: Any
    keys: KeyChain
    local: int = 0
    """Tokens that vLLM's own cache held when the tier was last asked."""
    block_ids: list[int] = field(default_factory=list)
    seen: int = 0
    """Blocks that have been saved, or found in the tier."""
    peer_answer: tuple[int, int, float] = (0, 0, 0.0)
    """From which block on the other server was asked, how many it has, and when."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    pieces: tuple[Piece, ...]
    slots: tuple[int, ...]


def describable(request: Any) -> bool:
    """Whether tokens and salt alone say what a request's blocks hold. An adapter is known by a name that may come to
    mean another one; images and embeddings are not tokens; where input comes in parts, tokens are taken back. Such
    requests are served as without the tier."""
    return (
        request.lora_request is None
        and not request.mm_features
        and request.prompt_embeds is None
        and not request.resumable
    )


class Planner:
    def __init__(self, block_size: int, peer: Peer | None = None) -> None:
        self._peer = peer
        self._block_size = block_size
        self._index = BlockIndex(0)
        self._followed: dict[str, _Followed] = {}
        self._under_way: dict[str, _UnderWay] = {}
        self._orders = Orders()

    def provide(self, slots: int) -> None:
        self._index = BlockIndex(slots)

    # --- before a request runs ------------------------------------------------------------------------------------

    def loadable(self, request: Any, computed: int) -> int:
        """Tokens after the first `computed` that the tier holds, and after those the other server. The last token is
        always computed: its logits are what is wanted."""
        if not describable(request):
            return 0
        first, end = computed // self._block_size, (request.num_tokens - 1) // self._block_size
        followed = self._follow(request)
        followed.local = computed
        # Something is wanted of every token (logprobs of the prompt). vLLM knows that by itself from 0.31 on.
        if request.skip_reading_prefix_cache:
            return 0
        keys = followed.keys.up_to(request.all_token_ids, end)
        place = first
        while place < end and self._index.find(keys[place]) is not None:
            place += 1
        if self._peer is not None and place < end:
            place += self._held_by_peer(self._peer, followed, keys, place)
        return max(place - first, 0) * self._block_size

    def _held_by_peer(self, peer: Peer, followed: _Followed, keys: Sequence[bytes], place: int) -> int:
        asked_from, held, when = followed.peer_answer
        if asked_from != place or time.monotonic() - when > ANSWER_HOLDS_SECONDS:
            held = peer.held(keys[place:])
            followed.peer_answer = (place, held, time.monotonic())
        return held

    def _follow(self, request: Any) -> _Followed:
        followed = self._followed.get(request.request_id)
        if followed is None:
            followed = _Followed(request, KeyChain(self._block_size, request.cache_salt))
            self._followed[request.request_id] = followed
        return followed

    def allocated(self, request: Any, block_ids: Sequence[int], external: int) -> None:
        """`external` tokens, after those of which `loadable` was told, are to be loaded into `block_ids`."""
        if not external:
            return
        followed = self._follow(request)
        first = followed.local // self._block_size
        end = first + external // self._block_size
        keys = followed.keys.up_to(request.all_token_ids, end)
        pieces: list[Piece] = []
        slots: list[int] = []
        for place in range(first, end):
            slot = None if pieces and pieces[-1].from_peer else self._index.find(keys[place])
            pieces.append(Piece(keys[place], block_ids[place], from_peer=slot is None))
            if slot is not None:
                self._index.touch(keys[place])
                self._index.pin(slot)
                slots.append(slot)
        if pieces[-1].from_peer and self._peer is None:
            raise AssertionError(f"blocks of {request.request_id} were promised and are not there")
        self._under_way[request.request_id] = _UnderWay(tuple(pieces), tuple(slots))
        self._orders.loads.append(Load(request.request_id, tuple(pieces)))

    # --- every step -----------------------------------------------------------------------------------------------

    def orders(self, output: Any) -> Orders:
        for new in output.scheduled_new_reqs:
            if new.req_id in self._followed:
                self._followed[new.req_id].block_ids = list(new.block_ids[0])
                self._save(new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for request_id, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            followed = self._followed.get(request_id)
            if followed is None:
                continue
            if request_id in cached.resumed_req_ids:
                followed.block_ids = []
            followed.block_ids.extend(added[0] if added else ())
            self._save(request_id, computed + output.num_scheduled_tokens[request_id])
        orders, self._orders = self._orders, Orders()
        orders.idle = output.total_num_scheduled_tokens == 0
        return orders

    def _save(self, request_id: str, computed: int) -> None:
        """`computed` tokens are in the KV cache after the step. Speculated ones among them may be wrong; those that
        the request knows are not."""
        followed = self._followed[request_id]
        full = min(computed, followed.request.num_tokens) // self._block_size
        if full <= followed.seen:
            return
        keys = followed.keys.up_to(followed.request.all_token_ids, full)
        for place in range(followed.seen, full):
            if self._index.find(keys[place]) is not None:
                self._index.touch(keys[place])
            elif (slot := self._index.place(keys[place])) is not None:
                self._orders.saves.append(Save(keys[place], slot, followed.block_ids[place]))
        followed.seen = full

    # --- what came of it ------------------------------------------------------------------------------------------

    def failed(self, block_ids: set[int]) -> None:
        """They could not be had: they are not looked for again, and kept anew when they have been computed."""
        for request_id, load in self._under_way.items():
            for piece in load.pieces:
                if piece.block_id in block_ids:
                    self._index.drop(piece.key)
                    if request_id in self._followed:
                        self._followed[request_id].seen = 0
                        self._followed[request_id].peer_answer = (0, 0, 0.0)
                    if piece.from_peer and self._peer is not None:
                        self._peer.rest()

    def loaded(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            load = self._under_way.pop(request_id)
            for slot in load.slots:
                self._index.unpin(slot)

    def finished(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def forget(self) -> None:
        """Also what requests that run now will compute: it builds on what is void."""
        self._index.clear()
        self._followed.clear()
        self._orders.forget = True
        self._orders.saves.clear()

    def take_evicted(self) -> int:
        evicted, self._index.evicted = self._index.evicted, 0
        return evicted
