"""Tests sleep mode with two tensor parallel workers on simulated cards: both release memory, and tokens stay equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import Result, batch, greedy, job, run_engines
from processes import SIM

pytestmark = [pytest.mark.server, pytest.mark.models]

WORK = {"batch": batch([[7, 300, 21, 9000, 44], list(range(1000, 1100)), [40000]], greedy(12))}
KV_CACHE = 64 << 20


@pytest.fixture(scope="module")
def steps(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    counters = {"rpc": "driver_memory"}
    taken = {
        "first": WORK,
        "look": {"rpc": "memory"},
        "awake": counters,
        "sleep 1": {"sleep": 1},
        "level 1": counters,
        "wake 1": {"wake": None},
        "again": counters,
        "second": WORK,
        "sleep 2": {"sleep": 2},
        "level 2": counters,
        "wake weights": {"wake": ["weights"]},
        "reload": {"call": "reload_weights"},
        "wake cache": {"wake": ["kv_cache"]},
        "reloaded": counters,
        "third": WORK,
    }
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": KV_CACHE}
    engines = [
        job(
            tiny_llama,
            steps=list(taken.values()),
            tensor_parallel_size=2,
            enable_sleep_mode=True,
            **limits,
        ),
    ]
    [result] = run_engines(tmp_path_factory.mktemp("two-cards"), engines, SIM, device="sim")
    return dict(zip(taken, result["steps"], strict=True))


def tokens(done: list[Result]) -> list[list[int]]:
    """Returns the output tokens of a batch."""
    return [output["token_ids"] for output in done]


@pytest.mark.feature("Sleep: several workers", "sim")
def test_the_same_tokens_after_waking(steps: dict[str, Any]) -> None:
    assert len({tuple(answer) for answer in tokens(steps["first"])}) == 3
    assert tokens(steps["second"]) == tokens(steps["first"])
    assert tokens(steps["third"]) == tokens(steps["first"])


@pytest.mark.parametrize("level", ["level 1", "level 2"])
def test_each_card_gives_its_memory_back(steps: dict[str, Any], level: str) -> None:
    """Tests by the driver's counters, to one per cent, that a card releases its weights and its KV cache."""
    assert [worker["card"] for worker in steps["look"]] == [0, 1]
    for look, awake, asleep in zip(steps["look"], steps["awake"], steps[level], strict=True):
        released = look["weights"] + look["kv_cache"]
        assert look["kv_cache"] == pytest.approx(KV_CACHE, rel=0.01)
        assert awake["in_use"] - asleep["in_use"] == pytest.approx(released, rel=0.01)
        assert asleep["suspended"] == pytest.approx(released, rel=0.01)
        assert awake["resident"] - asleep["resident"] > 0.9 * look["weights"], "the pages must be released"


@pytest.mark.parametrize("woken", ["again", "reloaded"])
def test_each_card_has_its_memory_again(steps: dict[str, Any], woken: str) -> None:
    for awake, now in zip(steps["awake"], steps[woken], strict=True):
        assert now["suspended"] == 0
        assert now["in_use"] == pytest.approx(awake["in_use"], rel=0.01)
