"""Tests memory on simulated cards: tensor parallelism on two cards, memory accounting of each card, and sleep mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
from engine import Result, batch, greedy, job, run_engines
from processes import SIM

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 24
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1100)), [40000], list(range(31, 20031, 300))]
KV_CACHE = 64 << 20
KEPT = "model.layers.1.mlp."


@pytest.fixture(scope="module")
def results(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    work = {"batch": batch(PROMPTS, greedy(TOKENS))}
    look, counters, contents = {"rpc": "memory"}, {"rpc": "driver_memory"}, {"rpc": "parameters"}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": KV_CACHE}
    level_1 = (work, counters, {"sleep": 1}, counters, {"wake": None}, counters, work)
    reload = ({"wake": ["weights"]}, contents, {"call": "reload_weights"}, {"wake": ["kv_cache"]})
    level_2 = (contents, {"sleep": 2}, counters, *reload, counters, work)
    asleep = {"enable_sleep_mode": True, "sleep_preserve_parameter_names": [f"{KEPT}*"]}
    engines = {
        "one": job(tiny_llama, steps=(work, look), **limits),
        "two": job(tiny_llama, steps=(work, look), tensor_parallel_size=2, **limits),
        "asleep": job(tiny_llama, steps=(*level_1, *level_2), **asleep, **limits),
    }
    done = run_engines(tmp_path_factory.mktemp("memory"), list(engines.values()), SIM, device="sim")
    return dict(zip(engines, done, strict=True))


def tokens(done: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the output tokens of a batch."""
    return [output["token_ids"] for output in done]


@pytest.mark.feature("Parallel: tensor", "sim")
def test_two_cards_give_the_tokens_of_one(results: dict[str, Result], tiny_llama: Path) -> None:
    reference.require_no_tie(tiny_llama, PROMPTS, TOKENS)
    assert tokens(results["two"]["steps"][0]) == tokens(results["one"]["steps"][0])
    assert len({tuple(answer) for answer in tokens(results["two"]["steps"][0])}) == len(PROMPTS)


def test_each_worker_holds_memory_on_its_own_card_alone(results: dict[str, Result]) -> None:
    for name, cards in (("one", [0]), ("two", [0, 1])):
        workers = results[name]["steps"][1]
        assert [worker["card"] for worker in workers] == cards
        for worker in workers:
            assert [card for card, held in enumerate(worker["held"]) if held] == [worker["card"]]


def test_what_a_card_counts_is_what_its_tensors_take(results: dict[str, Result]) -> None:
    """Tests the accounting of a card to one per cent. Most of the memory is the requested KV cache and the weights."""
    for name in ("one", "two"):
        for worker in results[name]["steps"][1]:
            held = worker["held"][worker["card"]]
            assert held == pytest.approx(worker["tensors"], rel=0.01)
            assert worker["kv_cache"] == pytest.approx(KV_CACHE, rel=0.01)
            assert worker["weights"] + worker["kv_cache"] > 0.8 * held


def test_two_cards_divide_the_weights(results: dict[str, Result]) -> None:
    """Tests that each card has half of the weights. Only the small norms are on both cards."""
    one, two = (results[name]["steps"][1] for name in ("one", "two"))
    for worker in two:
        assert worker["weights"] == pytest.approx(one[0]["weights"] / 2, rel=0.01)


@pytest.mark.feature("Sleep: level 1", "sim")
@pytest.mark.feature("Sleep: level 2 and weight reload", "sim")
def test_sleep_gives_memory_back_and_the_same_tokens_after_waking(results: dict[str, Result]) -> None:
    (
        first, awake, _, light, _, again, second,
        _, _, deep, _, _, _, _, loaded, third,
    ) = results["asleep"]["steps"]  # fmt: skip
    assert tokens(first) == tokens(results["one"]["steps"][0])
    assert tokens(second) == tokens(first)
    assert tokens(third) == tokens(first)
    [before], [level_1], [after], [level_2], [reloaded] = awake, light, again, deep, loaded
    weights = results["one"]["steps"][1][0]["weights"]
    released = weights + results["one"]["steps"][1][0]["kv_cache"]
    for asleep in (level_1, level_2):
        assert before["in_use"] - asleep["in_use"] == pytest.approx(released, rel=0.01)
        assert asleep["suspended"] == pytest.approx(released, rel=0.01)
        assert before["resident"] - asleep["resident"] > 0.9 * weights, "the pages must be released"
    for woken in (after, reloaded):
        assert woken["suspended"] == 0
        assert woken["in_use"] == pytest.approx(before["in_use"], rel=0.01)


def test_a_deep_sleep_keeps_the_parameters_that_were_named(results: dict[str, Result]) -> None:
    """Tests that sleep level 2 keeps exactly the named parameters, before the others are loaded again."""
    steps = results["asleep"]["steps"]
    [before], [woken] = steps[7], steps[11]
    kept = {name for name in before if name.startswith(KEPT)}
    assert len(kept) >= 2
    assert {name for name in before if before[name] == woken[name]} == kept
