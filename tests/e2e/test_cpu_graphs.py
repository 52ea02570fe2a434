"""Decode steps replayed on the cpu device give the tokens of eager ones: padded, preempted, from prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import Result, batch, greedy, job, run_engines, try_engines
from worker_questions import ASKING

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 16
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1080)), [40000], list(range(31, 20031, 300)), [5, 6], [77, 78, 79]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
WORK = [
    *({"batch": batch(PROMPTS[:count], greedy(TOKENS))} for count in (1, 3, 6, 4)),
    {"batch": batch([[*PROMPTS[1], 9, more] for more in (1, 2)], greedy(TOKENS))},  # the prefix is in the cache by now
    {"batch": batch(PROMPTS[:2], SAMPLED)},
    {"ask": "replays"},
]
PADDED = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4, 8]}
TIGHT = {"kv_cache_memory_bytes": 20 << 20}  # 27 blocks of 16 tokens: six sequences do not fit until their end
CROWD = {"batch": batch([list(range(start, start + 60)) for start in range(100, 700, 100)], greedy(40))}


@pytest.fixture(scope="module")
def results(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    engines = {
        "eager": job(smollm2, steps=WORK, enforce_eager=True),
        "replayed": job(smollm2, steps=WORK),
        "padded": job(smollm2, steps=WORK, compilation_config=PADDED),
        "tight": job(smollm2, steps=[CROWD, {"ask": "replays"}], **TIGHT),
        "tight and eager": job(smollm2, steps=[CROWD], enforce_eager=True, **TIGHT),
    }
    done = run_engines(tmp_path_factory.mktemp("graphs"), list(engines.values()), ASKING)
    return dict(zip(engines, done, strict=True))


def tokens(done: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in done]


@pytest.mark.parametrize("way", ["replayed", "padded"])
def test_tokens_equal_those_of_eager_steps(results: dict[str, Result], way: str) -> None:
    for place in range(len(WORK) - 1):
        assert tokens(results[way]["steps"][place]) == tokens(results["eager"]["steps"][place]), WORK[place]
    assert results[way]["steps"][4][1]["num_cached_tokens"] > 0


def test_tokens_are_the_same_when_sequences_are_preempted(results: dict[str, Result]) -> None:
    assert tokens(results["tight"]["steps"][0]) == tokens(results["tight and eager"]["steps"][0])
    assert results["tight"]["steps"][1][0]["replays"] > 40


def test_steps_were_replayed(results: dict[str, Result]) -> None:
    [eager], [exact], [padded] = (results[way]["steps"][-1] for way in ("eager", "replayed", "padded"))
    assert eager == {"captured": 0, "replays": 0, "given_up": 0}
    # Of each batch: all tokens but the first. The first step of a size is captured; some share one with a prompt:
    # requests reach the engine one by one.
    decoded = 6 * (TOKENS - 1)
    for found in (exact, padded):
        assert found["replays"] >= decoded - 24
        assert found["given_up"] == 0
    assert exact["captured"] >= 5, "1, 2, 3, 4 and 6 sequences"
    assert padded["captured"] == 3


def test_others_are_served_without_graphs(tiny_llama: Path, tmp_path: Path) -> None:
    """The guard that looks at modules, tensor parallelism, and users who want none."""
    steps = [{"batch": batch(PROMPTS[:2], greedy(8))}, {"ask": "replays"}]
    settings: list[dict[str, Any]] = [
        {},
        {"additional_config": {"backplane": {"numeric_guard": "layers"}}},
        {"compilation_config": {"cudagraph_mode": "NONE"}},
        {"tensor_parallel_size": 2},
    ]
    done = run_engines(tmp_path, [job(tiny_llama, steps=steps, **one) for one in settings], ASKING)
    first = done[0]
    assert first["steps"][1][0]["replays"] >= 4
    for one in done[1:]:
        assert tokens(one["steps"][0]) == tokens(first["steps"][0])
        assert all(worker["replays"] == 0 for worker in one["steps"][1])


def test_a_stale_input_gives_no_wrong_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    work = {"batch": batch(PROMPTS[:1], greedy(8))}
    steps = [work, {"ask": "plant_stale_input"}, work, {"ask": "replays"}]
    [result], log = try_engines(tmp_path, [job(tiny_llama, steps=steps)], ASKING)
    assert tokens(result["steps"][2]) == tokens(result["steps"][0])
    assert result["steps"][3] == [{"captured": 1, "replays": 6, "given_up": 1}]
    assert "run eagerly, which is slower: the input input_ids is another tensor" in log.read_text(errors="replace")
