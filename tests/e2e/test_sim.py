"""Tests that engines on the simulated NPU give the tokens of the cpu device, without fallbacks to the host."""

from __future__ import annotations

from pathlib import Path

import prompts
import pytest
import reference
from engine import Result, batch, greedy, job, run_engines
from processes import SIM

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 20
IDS = [[7, 300, 21, 9000, 44], list(range(1000, 1100)), [40000], list(range(31, 20031, 300))]
DRAWN = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.02,
    "seed": 11,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "detokenize": False,
}


@pytest.fixture(scope="module")
def results(smollm2: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [tokenizer.encode(text) for text in (*prompts.SHORT[::5], prompts.PASSAGE + prompts.QUESTIONS[0])]
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 256}  # the passage needs several chunks
    jobs = [
        job(smollm2, batch(texts, greedy(TOKENS)), batch(texts[-1:], greedy(TOKENS)), **limits),
        job(tiny_llama, batch(IDS, greedy(TOKENS, logprobs=0)), batch(IDS, DRAWN), async_scheduling=False),
    ]
    folder = tmp_path_factory.mktemp
    return {
        "sim": run_engines(folder("sim"), jobs, SIM, device="sim"),
        "cpu": run_engines(folder("cpu"), jobs, {"BACKPLANE_DEVICE": "cpu"}, device="cpu"),
    }


def tokens(result: Result) -> list[list[list[int]]]:
    """Returns the output tokens of all batches."""
    return [[output["token_ids"] for output in done] for done in result["batches"]]


def test_it_ran_on_the_simulated_card(results: dict[str, list[Result]]) -> None:
    assert [result["device"] for result in results["sim"]] == ["bpnpu", "bpnpu"]
    assert [result["device"] for result in results["cpu"]] == ["cpu", "cpu"]


@pytest.mark.feature("Model family: Llama", "sim")
@pytest.mark.parametrize("model", [0, 1], ids=["the default model", "a tiny one"])
def test_tokens_equal_the_cpu_devices(results: dict[str, list[Result]], model: int) -> None:
    """Tests greedy decoding, also with chunked prefill and prefix hits, and sampling."""
    assert tokens(results["sim"][model]) == tokens(results["cpu"][model])


def test_no_answer_is_near_a_tie(tiny_llama: Path) -> None:
    """Tests the prompts of the tiny model. test_parity.py compares those of the default model with transformers."""
    reference.require_no_tie(tiny_llama, IDS, TOKENS)


@pytest.mark.feature("Serving: async scheduling off", "sim")
def test_tokens_are_the_same_without_async_scheduling(results: dict[str, list[Result]]) -> None:
    """Tests that async scheduling is on for the default model and off for the tiny one, as requested."""
    assert [result["async_scheduling"] for result in results["sim"]] == [True, False]
    assert tokens(results["sim"][1]) == tokens(results["cpu"][1])


@pytest.mark.feature("KV cache: prefix caching", "sim")
def test_the_prefix_was_reused(results: dict[str, list[Result]]) -> None:
    """Tests that the prefix cache had hits, without which the test above would not test it."""
    assert results["sim"][0]["batches"][1][0]["num_cached_tokens"] > 256


@pytest.mark.feature("Serving: log-probabilities of the output", "sim")
def test_probabilities_equal_the_cpu_devices(results: dict[str, list[Result]]) -> None:
    ours, theirs = (results[device][1]["batches"][0] for device in ("sim", "cpu"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


def test_answers_depend_on_the_prompt(results: dict[str, list[Result]]) -> None:
    for result in results["sim"]:
        answers = tokens(result)[0]
        assert len({tuple(answer) for answer in answers}) == len(answers)
