"""Tests that captured and replayed decode steps on the simulated NPU give the tokens of eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import Result, batch, greedy, job, require_backplane, try_engines
from processes import SIM, tail

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 24
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1100)), [40000], list(range(31, 20031, 300)), [5, 6], [77, 78, 79]]
SIZES = [1, 2, 4]
DECODE = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "all steps": (
        {"compilation_config": {"cudagraph_mode": "FULL"}},
        "only decode steps are captured; use -cc.cudagraph_mode=full_decode_only",
    ),
    "collectives": (
        {"compilation_config": DECODE, "tensor_parallel_size": 2},
        "cannot contain the collectives of several workers",
    ),
    "numeric guard": (
        {"compilation_config": DECODE, "additional_config": {"backplane": {"numeric_guard": "layers"}}},
        "a replayed graph does not call them",
    ),
}
"""Engine arguments that must be refused, with a part of the error message."""


@pytest.fixture(scope="module")
def results(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    # 1 sequence is a captured size, 3 are padded to 4, 6 exceed all sizes and run eagerly, 4 prompts start one by one.
    work = [{"batch": batch(PROMPTS[:count], greedy(TOKENS))} for count in (1, 3, 6, 4)]
    drawn = {"batch": batch(PROMPTS[:2], {"temperature": 0.9, "seed": 3, "max_tokens": TOKENS, "ignore_eos": True})}
    steps = [*work, drawn, {"rpc": "graphs"}, {"sleep": 1}, {"wake": None}, *work, {"rpc": "graphs"}]
    limits = {**LIMITS, "enable_sleep_mode": True}
    jobs = {
        "eager": job(tiny_llama, steps=steps, compilation_config={"cudagraph_mode": "NONE"}, **limits),
        # Only the sizes are given, because graphs are the default of the device.
        "replayed": job(tiny_llama, steps=steps, compilation_config={"cudagraph_capture_sizes": SIZES}, **limits),
        # Graphs are not requested explicitly, and this operator cannot be captured, so all steps run eagerly.
        "by reference": job(
            tiny_llama,
            steps=[work[0], {"rpc": "graphs"}],
            additional_config={"backplane": {"reference_ops": ["paged_attention"]}},
            **LIMITS,
        ),
        **{name: job(tiny_llama, **LIMITS, **engine) for name, (engine, _) in REFUSED.items()},
    }
    done, log = try_engines(tmp_path_factory.mktemp("graphs"), list(jobs.values()), SIM)
    results = dict(zip(jobs, done, strict=True))
    for name in ("eager", "replayed", "by reference"):
        assert "error" not in results[name], results[name]["error"] + tail(log)
        require_backplane(results[name])
        assert results[name]["device"] == "bpnpu"
    return results


def tokens(done: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the output tokens of a batch."""
    return [output["token_ids"] for output in done]


@pytest.mark.feature("Serving: graphs of decode steps", "sim")
def test_tokens_equal_those_of_eager_steps(results: dict[str, Result]) -> None:
    for place in (0, 1, 2, 3, 4, 8, 9, 10, 11):  # the last four after a sleep
        assert tokens(results["replayed"]["steps"][place]) == tokens(results["eager"]["steps"][place])


def test_steps_were_replayed_and_others_were_not(results: dict[str, Result]) -> None:
    [eager], [first] = (results[way]["steps"][5] for way in ("eager", "replayed"))
    assert eager == {"captured": 0, "replays": 0, "graph_launches": 0}
    assert first["captured"] == len(SIZES)
    # In the batches of 1, 3 and 4 and the sampled one, all tokens but the first come from decode steps, a few of which
    # also contain a prefill and are not replayed. In the batch of 6, the last steps have few sequences left.
    assert first["replays"] >= 4 * (TOKENS - 1) - 12
    assert first["graph_launches"] == first["replays"]
    [second] = results["replayed"]["steps"][12]
    assert second["replays"] > first["replays"], "graphs must work after a sleep"


def test_an_operator_that_no_graph_can_contain_keeps_steps_eager(results: dict[str, Result]) -> None:
    served, [graphs] = results["by reference"]["steps"]
    assert graphs["captured"] == 0
    assert tokens(served) == tokens(results["eager"]["steps"][0])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(results: dict[str, Result], name: str) -> None:
    assert REFUSED[name][1] in results[name]["error"]
