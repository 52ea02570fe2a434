"""Checks which blocks the scheduler side of KV offload loads and saves, step by step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_backplane.kv_offload.cache_rows import CacheRows
from vllm_backplane.kv_offload.metadata import StepMetadata
from vllm_backplane.kv_offload.scheduler import OffloadScheduler
from vllm_backplane.kv_offload.slots import MemorySlots
from vllm_backplane.kv_offload.store import BlockStore
from vllm_backplane.kv_offload.worker import OffloadWorker

SIZE = 4


def request(name: str, tokens: Sequence[int], **more: Any) -> Any:
    fields: dict[str, Any] = {
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "cache_salt": None,
        "resumable": False,
    }
    fields["skip_reading_prefix_cache"] = False
    ids = list(tokens)
    return SimpleNamespace(request_id=name, all_token_ids=ids, num_tokens=len(ids), **{**fields, **more})


def step(scheduler: OffloadScheduler, new: Sequence[tuple[Any, list[int], int, int]] = ()) -> StepMetadata:
    """Runs a step of new requests, each with its block IDs, its computed tokens and its scheduled tokens."""
    return scheduler.build_metadata(
        SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=one.request_id, block_ids=(blocks,), num_computed_tokens=computed)
                for one, blocks, computed, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens={one.request_id: scheduled for one, _, _, scheduled in new},
            total_num_scheduled_tokens=sum(scheduled for *_, scheduled in new),
        )
    )


def go_on(
    scheduler: OffloadScheduler, name: str, computed: int, scheduled: int, blocks: list[int], resumed: bool = False
) -> StepMetadata:
    return scheduler.build_metadata(
        SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name],
                new_block_ids=[(blocks,) if blocks else None],
                num_computed_tokens=[computed],
                resumed_req_ids={name} if resumed else set(),
            ),
            num_scheduled_tokens={name: scheduled},
            total_num_scheduled_tokens=scheduled,
        )
    )


@pytest.fixture
def scheduler() -> OffloadScheduler:
    made = OffloadScheduler(SIZE)
    made.set_slots(8)
    return made


def run(scheduler: OffloadScheduler, one: Any, blocks: list[int]) -> StepMetadata:
    """Computes a whole prompt in one step."""
    assert scheduler.num_matched_tokens(one, 0) == 0
    scheduler.plan_load(one, blocks, 0)
    return step(scheduler, [(one, blocks, 0, one.num_tokens)])


def saved(metadata: StepMetadata) -> list[int]:
    return [save.block_id for save in metadata.saves]


def test_full_blocks_are_kept_and_matched(scheduler: OffloadScheduler) -> None:
    assert saved(run(scheduler, request("a", range(10)), [5, 6, 7])) == [5, 6]
    assert scheduler.num_matched_tokens(request("b", range(10)), 0) == 8
    assert scheduler.num_matched_tokens(request("c", range(10)), SIZE) == 4, "the first is in vLLM's own cache"
    assert scheduler.num_matched_tokens(request("d", [0, 1, 2, 3, 99, 5, 6, 7, 8]), 0) == 4
    assert scheduler.num_matched_tokens(request("e", range(8)), 0) == 4, "the last token is to be computed"
    assert scheduler.num_matched_tokens(request("f", range(10), cache_salt="mine"), 0) == 0


@pytest.mark.parametrize(
    "other", [{"lora_request": "one"}, {"mm_features": ["an image"]}, {"prompt_embeds": "some"}, {"resumable": True}]
)
def test_what_tokens_do_not_describe_is_left_alone(scheduler: OffloadScheduler, other: dict[str, Any]) -> None:
    run(scheduler, request("a", range(10)), [5, 6, 7])
    special = request("b", range(10), **other)
    assert saved(run(scheduler, special, [1, 2, 3])) == []


def test_tokens_that_were_only_guessed_are_not_kept(scheduler: OffloadScheduler) -> None:
    one = request("a", range(6))
    assert scheduler.num_matched_tokens(one, 0) == 0
    assert saved(step(scheduler, [(one, [5, 6, 7], 0, 6)])) == [5]
    one.all_token_ids.append(6)
    one.num_tokens = 7
    assert saved(go_on(scheduler, "a", 6, 1 + 3, [])) == [], "three of these are draft tokens"
    one.all_token_ids.append(7)
    one.num_tokens = 8
    assert saved(go_on(scheduler, "a", 7, 1 + 3, [])) == [6]


def test_blocks_of_a_request_that_was_put_off_are_its_new_ones(scheduler: OffloadScheduler) -> None:
    one = request("a", range(10))
    assert scheduler.num_matched_tokens(one, 0) == 0
    assert saved(step(scheduler, [(one, [1, 2, 3], 0, 4)])) == [1]
    assert saved(go_on(scheduler, "a", 0, 10, [7, 8, 9], resumed=True)) == [8], "the first is stored already"


def load(scheduler: OffloadScheduler, one: Any, blocks: list[int]) -> StepMetadata:
    matched = scheduler.num_matched_tokens(one, 0)
    scheduler.plan_load(one, blocks, matched)
    return step(scheduler)


def test_a_load_goes_into_the_blocks_of_the_request(scheduler: OffloadScheduler) -> None:
    run(scheduler, request("a", range(10)), [5, 6, 7])
    metadata = load(scheduler, request("b", range(10)), [1, 2, 3])
    [one] = metadata.loads
    assert (one.request_id, [block.block_id for block in one.blocks]) == ("b", [1, 2])
    assert metadata.idle
    assert step(scheduler).loads == [], "once"


def test_a_block_that_failed_is_not_matched_again_and_kept_anew(scheduler: OffloadScheduler) -> None:
    run(scheduler, request("a", range(14)), [5, 6, 7, 8])
    one = request("b", range(14))
    load(scheduler, one, [1, 2, 3, 4])
    scheduler.handle_failed_blocks({2})
    scheduler.finish_loads(["b"])
    assert scheduler.num_matched_tokens(request("c", range(14)), 0) == 4
    assert saved(step(scheduler, [(one, [1, 2, 3, 4], 4, 10)])) == [2]
    assert scheduler.num_matched_tokens(request("d", range(14)), 0) == 12


def test_a_block_that_is_being_loaded_stays_where_it_is() -> None:
    scheduler = OffloadScheduler(SIZE)
    scheduler.set_slots(2)
    run(scheduler, request("a", range(10)), [5, 6, 7])
    load(scheduler, request("b", range(10)), [1, 2, 3])
    assert saved(run(scheduler, request("c", range(100, 110)), [8, 9, 10])) == [], "no slot is free"
    scheduler.finish_loads(["b"])
    assert saved(run(scheduler, request("d", range(200, 210)), [8, 9, 10])) == [8, 9]
    assert scheduler.take_evicted() == 2


def test_forgetting_is_also_for_what_runs(scheduler: OffloadScheduler) -> None:
    one = request("a", range(12))
    assert scheduler.num_matched_tokens(one, 0) == 0
    step(scheduler, [(one, [1, 2, 3], 0, 8)])
    scheduler.reset()
    metadata = go_on(scheduler, "a", 8, 4, [])
    assert metadata.reset
    assert saved(metadata) == []
    assert scheduler.num_matched_tokens(request("b", range(12)), 0) == 0


def test_of_a_prompt_whose_every_token_is_wanted_nothing_is_loaded(scheduler: OffloadScheduler) -> None:
    first = request("first", range(9))
    assert scheduler.num_matched_tokens(first, 0) == 0
    step(scheduler, [(first, [0, 1, 2], 0, 9)])
    assert scheduler.num_matched_tokens(request("again", range(9)), 0) == 8
    assert (
        scheduler.num_matched_tokens(request("logprobs of the prompt", range(9), skip_reading_prefix_cache=True), 0)
        == 0
    )


@pytest.fixture
def worker() -> Iterator[OffloadWorker]:
    cache = torch.zeros(8, 16)
    store = BlockStore(MemorySlots(8, cache[0].nbytes))
    made = OffloadWorker(CacheRows([cache], 8), store, None, lambda _text: None)
    yield made
    made.close()


def execute(worker: OffloadWorker, metadata: StepMetadata) -> int | None:
    """Runs a step on the worker, and returns the first step with the present weights as the worker reports it."""
    worker.begin_step(metadata)
    worker.save_blocks(metadata)
    return worker.weights_since


def stored(worker: OffloadWorker, metadata: StepMetadata) -> int:
    return worker.store.count_stored([save.key for save in metadata.saves])


def replace_weights(worker: OffloadWorker) -> None:
    worker.begin_weight_change()
    worker.end_weight_change()


def test_new_weights_reach_both_sides(scheduler: OffloadScheduler, worker: OffloadWorker) -> None:
    """Tests a request that runs while weights change: none of its blocks may be stored under the new weights."""
    one = request("a", range(12))
    first = run(scheduler, request("before", range(20, 30)), [4, 5, 6])
    assert execute(worker, first) == 0
    assert stored(worker, first) == 2
    assert scheduler.num_matched_tokens(one, 0) == 0
    planned = step(scheduler, [(one, [1, 2, 3], 0, 8)])
    assert execute(worker, planned) == 0
    replace_weights(worker)
    late = go_on(scheduler, "a", 8, 4, [])
    assert saved(late) == [3], "it was planned before the scheduler knew"
    since = execute(worker, late)
    assert (since, late.number) == (3, 3)
    assert [stored(worker, metadata) for metadata in (first, planned, late)] == [0, 0, 0]
    scheduler.set_weights(since)
    assert saved(go_on(scheduler, "a", 12, 1, [])) == []
    assert scheduler.num_matched_tokens(request("again", range(20, 30)), 0) == 0, "it was computed with other weights"
    new = run(scheduler, request("b", range(12)), [4, 5, 6])
    assert saved(new) == [4, 5, 6]
    assert execute(worker, new) == since
    assert stored(worker, new) == 3
    scheduler.set_weights(since)
    assert scheduler.num_matched_tokens(request("c", range(12)), 0) == 8, "a report of known weights changes nothing"


def test_nothing_is_saved_while_weights_are_replaced(scheduler: OffloadScheduler, worker: OffloadWorker) -> None:
    worker.begin_weight_change()
    during = [run(scheduler, request("a", range(8)), [1, 2])]
    scheduler.set_weights(execute(worker, during[0]))
    during.append(run(scheduler, request("b", range(20, 28)), [3, 4]))
    assert execute(worker, during[1]) is None
    assert [stored(worker, metadata) for metadata in during] == [0, 0]
    assert saved(during[1]) == [], "the scheduler knows"
    worker.end_weight_change()
    after = step(scheduler)
    assert execute(worker, after) == after.number
    scheduler.set_weights(after.number)
    assert saved(step(scheduler, [(request("c", range(8)), [1, 2], 8, 1)])) == []


def test_what_the_first_step_with_new_weights_computed_is_saved(
    scheduler: OffloadScheduler, worker: OffloadWorker
) -> None:
    """Tests blocks that the worker did not save, because the scheduler planned them before it knew the new weights."""
    replace_weights(worker)
    one = request("a", range(8))
    early = run(scheduler, one, [1, 2])
    scheduler.set_weights(execute(worker, early))
    assert stored(worker, early) == 0
    again = go_on(scheduler, "a", 8, 1, [3])
    execute(worker, again)
    assert (saved(again), stored(worker, again)) == ([1, 2], 2)


def begin(scheduler: OffloadScheduler, name: str, tokens: Sequence[int], blocks: list[int], found: int) -> list[int]:
    """Computes a prompt of which vLLM's prefix cache has the first `found` tokens. Returns the saved blocks."""
    one = request(name, tokens)
    scheduler.num_matched_tokens(one, found)
    return saved(step(scheduler, [(one, blocks, found, one.num_tokens - found)]))


def test_old_blocks_in_the_prefix_cache_are_not_saved(
    scheduler: OffloadScheduler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that neither old blocks which vLLM finds are saved, nor what is computed after them."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    begin(scheduler, "old", range(8), [1, 2], 0)
    begin(scheduler, "also old", range(50, 54), [6], 0)
    step(scheduler)
    scheduler.set_weights(3)
    assert begin(scheduler, "a", range(13), [1, 2, 3, 4], 8) == []
    assert begin(scheduler, "b", range(13), [1, 2, 3, 5], 12) == [], "its third block was computed after old ones"
    # pytest may capture a record twice, because it also listens to loggers that do not propagate.
    warnings = {id(record) for record in caplog.records if "reset_prefix_cache" in record.getMessage()}
    assert len(warnings) == 1
    assert begin(scheduler, "c", range(13), [4, 5, 6, 7], 0) == [4, 5, 6], "it depends on nothing old"
    assert begin(scheduler, "d", [*range(12), 99, 98, 97, 96], [4, 5, 6, 0], 12) == [0], "it found new blocks"


def test_a_block_that_is_found_in_part_may_be_old(scheduler: OffloadScheduler) -> None:
    assert begin(scheduler, "a", range(8), [1, 2], 2) == [1, 2], "there have been no other weights"
    step(scheduler)
    scheduler.set_weights(2)
    assert begin(scheduler, "b", range(20, 28), [3, 4], 0) == [3, 4]
    assert begin(scheduler, "c", [*range(20, 26), 9, 9], [3, 5], 6) == [], "vLLM copied the second from another block"


def test_requests_without_offload_pass_on_what_is_old(scheduler: OffloadScheduler) -> None:
    """Tests a request with an image, whose text before the image other requests may find."""
    begin(scheduler, "old", range(8), [1, 2], 0)
    scheduler.set_weights(2)
    pictured = request("pictured", range(12), mm_features=["an image"])
    step(scheduler, [(pictured, [1, 2, 3], 8, 4)])
    go_on(scheduler, "pictured", 12, 4, [4])
    assert begin(scheduler, "a", [*range(16), 1], [1, 2, 3, 4, 5], 16) == []
    scheduler.request_finished("pictured")
    clean = request("clean", range(12), mm_features=["an image"])
    step(scheduler, [(clean, [5, 6, 7], 0, 12)])
    assert begin(scheduler, "b", range(13), [5, 6, 7, 1], 12) == [5, 6, 7]


def test_a_request_that_is_computed_again_is_saved(scheduler: OffloadScheduler) -> None:
    """Tests a request that ran with other weights and was preempted, as a reset of the prefix cache does."""
    one = request("a", range(8))
    assert scheduler.num_matched_tokens(one, 0) == 0
    step(scheduler, [(one, [1, 2], 0, 4)])
    scheduler.set_weights(2)
    assert saved(go_on(scheduler, "a", 4, 4, [])) == []
    assert scheduler.num_matched_tokens(one, 0) == 0
    assert saved(go_on(scheduler, "a", 0, 8, [1, 2], resumed=True)) == [1, 2]


def test_blocks_that_were_loaded_are_as_new_as_their_load(scheduler: OffloadScheduler) -> None:
    begin(scheduler, "old", range(12), [1, 2, 3], 0)
    scheduler.set_weights(2)
    begin(scheduler, "new", range(12), [4, 5, 6], 0)
    load(scheduler, request("a", [*range(8), 7, 7, 7, 7, 7]), [1, 2, 7, 8])
    scheduler.finish_loads(["a"])
    one = request("a", [*range(8), 7, 7, 7, 7, 7])
    assert saved(step(scheduler, [(one, [1, 2, 7, 8], 8, 5)])) == [7]
    load(scheduler, request("b", range(13)), [4, 5, 6, 8])
    scheduler.set_weights(scheduler._metadata.number)
    assert saved(step(scheduler, [(request("b", range(13)), [4, 5, 6, 8], 12, 1)])) == [], "loaded with other weights"
