"""What the scheduler's side of the second KV tier promises and keeps, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_backplane.kv_offload.metadata import Orders
from vllm_backplane.kv_offload.scheduler import Planner

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


def step(planner: Planner, new: Sequence[tuple[Any, list[int], int, int]] = ()) -> Orders:
    """New requests, each with its blocks, what it has, and what is computed."""
    return planner.orders(
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
    planner: Planner, name: str, computed: int, scheduled: int, blocks: list[int], resumed: bool = False
) -> Orders:
    return planner.orders(
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
def planner() -> Planner:
    made = Planner(SIZE)
    made.provide(8)
    return made


def run(planner: Planner, one: Any, blocks: list[int]) -> Orders:
    """All of a prompt in one step."""
    assert planner.loadable(one, 0) == 0
    planner.allocated(one, blocks, 0)
    return step(planner, [(one, blocks, 0, one.num_tokens)])


def saved(orders: Orders) -> list[int]:
    return [save.block_id for save in orders.saves]


def test_full_blocks_are_kept_and_promised(planner: Planner) -> None:
    assert saved(run(planner, request("a", range(10)), [5, 6, 7])) == [5, 6]
    assert planner.loadable(request("b", range(10)), 0) == 8
    assert planner.loadable(request("c", range(10)), SIZE) == 4, "vLLM has the first itself"
    assert planner.loadable(request("d", [0, 1, 2, 3, 99, 5, 6, 7, 8]), 0) == 4
    assert planner.loadable(request("e", range(8)), 0) == 4, "the last token is to be computed"
    assert planner.loadable(request("f", range(10), cache_salt="mine"), 0) == 0


@pytest.mark.parametrize(
    "other", [{"lora_request": "one"}, {"mm_features": ["an image"]}, {"prompt_embeds": "some"}, {"resumable": True}]
)
def test_what_tokens_do_not_describe_is_left_alone(planner: Planner, other: dict[str, Any]) -> None:
    run(planner, request("a", range(10)), [5, 6, 7])
    special = request("b", range(10), **other)
    assert saved(run(planner, special, [1, 2, 3])) == []


def test_tokens_that_were_only_guessed_are_not_kept(planner: Planner) -> None:
    one = request("a", range(6))
    assert planner.loadable(one, 0) == 0
    assert saved(step(planner, [(one, [5, 6, 7], 0, 6)])) == [5]
    one.all_token_ids.append(6)
    one.num_tokens = 7
    assert saved(go_on(planner, "a", 6, 1 + 3, [])) == [], "three of these are guesses"
    one.all_token_ids.append(7)
    one.num_tokens = 8
    assert saved(go_on(planner, "a", 7, 1 + 3, [])) == [6]


def test_blocks_of_a_request_that_was_put_off_are_its_new_ones(planner: Planner) -> None:
    one = request("a", range(10))
    assert planner.loadable(one, 0) == 0
    assert saved(step(planner, [(one, [1, 2, 3], 0, 4)])) == [1]
    assert saved(go_on(planner, "a", 0, 10, [7, 8, 9], resumed=True)) == [8], "the first is kept already"


def load(planner: Planner, one: Any, blocks: list[int]) -> Orders:
    promised = planner.loadable(one, 0)
    planner.allocated(one, blocks, promised)
    return step(planner)


def test_a_load_goes_into_the_blocks_of_the_request(planner: Planner) -> None:
    run(planner, request("a", range(10)), [5, 6, 7])
    orders = load(planner, request("b", range(10)), [1, 2, 3])
    [one] = orders.loads
    assert (one.request_id, [piece.block_id for piece in one.pieces]) == ("b", [1, 2])
    assert orders.idle
    assert step(planner).loads == [], "once"


def test_a_block_that_failed_is_not_promised_again_and_kept_anew(planner: Planner) -> None:
    run(planner, request("a", range(14)), [5, 6, 7, 8])
    one = request("b", range(14))
    load(planner, one, [1, 2, 3, 4])
    planner.failed({2})
    planner.loaded(["b"])
    assert planner.loadable(request("c", range(14)), 0) == 4
    assert saved(step(planner, [(one, [1, 2, 3, 4], 4, 10)])) == [2]
    assert planner.loadable(request("d", range(14)), 0) == 12


def test_a_block_that_is_being_loaded_stays_where_it_is() -> None:
    planner = Planner(SIZE)
    planner.provide(2)
    run(planner, request("a", range(10)), [5, 6, 7])
    load(planner, request("b", range(10)), [1, 2, 3])
    assert saved(run(planner, request("c", range(100, 110)), [8, 9, 10])) == [], "there is no slot to be had"
    planner.loaded(["b"])
    assert saved(run(planner, request("d", range(200, 210)), [8, 9, 10])) == [8, 9]
    assert planner.take_evicted() == 2


def test_forgetting_is_also_for_what_runs(planner: Planner) -> None:
    one = request("a", range(12))
    assert planner.loadable(one, 0) == 0
    step(planner, [(one, [1, 2, 3], 0, 8)])
    planner.forget()
    orders = go_on(planner, "a", 8, 4, [])
    assert orders.forget
    assert saved(orders) == []
    assert planner.loadable(request("b", range(12)), 0) == 0


def test_of_a_prompt_whose_every_token_is_wanted_nothing_is_loaded(planner: Planner) -> None:
    first = request("first", range(9))
    assert planner.loadable(first, 0) == 0
    step(planner, [(first, [0, 1, 2], 0, 9)])
    assert planner.loadable(request("again", range(9)), 0) == 8
    assert planner.loadable(request("logprobs of the prompt", range(9), skip_reading_prefix_cache=True), 0) == 0
