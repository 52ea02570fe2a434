"""Tests tensor and pipeline parallelism of two workers over gloo, and engines without kernels, on the cpu device.

All of them must give the tokens of one worker with kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
from engine import Result, batch, greedy, job, run_engines

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 24
SHORTER = 12
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1100)), [40000], list(range(31, 20031, 300))]


REFERENCES = {"backplane": {"reference_ops": "all"}}
AGAIN, LOOK, PLANT = {"batch": batch(PROMPTS, greedy(TOKENS))}, {"rpc": "resident"}, {"rpc": "plant_failing_sleep"}
ASLEEP = [
    *(LOOK, {"sleep": 1}, LOOK, {"wake": None}, AGAIN),
    *(LOOK, {"sleep": 2}, LOOK, {"wake": ["weights"]}, {"call": "reload_weights"}, {"wake": ["kv_cache"]}, AGAIN),
    *(PLANT, {"try to sleep": 2}, {"wake": None}, AGAIN, PLANT),
    *(LOOK, {"sleep": 1}, LOOK, {"wake": None}, AGAIN),
]
"""Steps in which two workers sleep and wake. Once, one worker cannot sleep, and the other must stay awake; the wake
step after that resumes the scheduler."""
WEIGHTS = 25 << 20
"""Approximate bytes of the weights of one worker: half of an embedding and of a head, 49152 x 128 in float32 each."""


@pytest.fixture(scope="module")
def results(tiny_llama: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    work = (batch(PROMPTS, greedy(TOKENS, logprobs=0)), batch(PROMPTS, greedy(TOKENS), one_by_one=True))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    engines = {
        "one": job(tiny_llama, *work, **limits),
        "tensor": job(tiny_llama, *work, steps=ASLEEP, enable_sleep_mode=True, tensor_parallel_size=2, **limits),
        "pipeline": job(tiny_llama, *work, pipeline_parallel_size=2, **limits),
        "references": job(tiny_llama, *work, steps=[{"rpc": "operators"}], additional_config=REFERENCES, **limits),
        # Two stages, because its thirty layers are divisible by two and its nine heads are not.
        "default model": job(smollm2, batch(PROMPTS, greedy(SHORTER)), pipeline_parallel_size=2, **limits),
    }
    done = run_engines(tmp_path_factory.mktemp("parallel"), list(engines.values()))
    return dict(zip(engines, done, strict=True))


def tokens(result: Result) -> list[list[list[int]]]:
    """Returns the output tokens of all batches."""
    return [[output["token_ids"] for output in done] for done in result["batches"]]


def assert_equal(answers: list[list[int]], expected: list[reference.Continuation]) -> None:
    """Fails unless the tokens are the expected ones, and none of them is near a tie."""
    assert min(answer.smallest_margin for answer in expected) > 1e-3, "near a tie; change the prompts"
    assert answers == [answer.token_ids for answer in expected]


def test_one_process_equals_transformers(tiny_llama: Path, results: dict[str, Result]) -> None:
    together, one_by_one = tokens(results["one"])
    assert results["one"]["runner"] == "V1", "the V2 model runner needs Triton"
    model = reference.load(tiny_llama)
    assert_equal(together, [reference.continue_without_cache(model, ids, TOKENS) for ids in PROMPTS])
    assert one_by_one == together


def test_the_default_model_in_two_processes_equals_transformers(smollm2: Path, results: dict[str, Result]) -> None:
    """Tests the default model with two pipeline stages. test_parity.py tests it in one process."""
    expected = reference.continue_together(reference.load(smollm2), PROMPTS, SHORTER)
    assert_equal(tokens(results["default model"])[0], expected)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("tensor", marks=pytest.mark.feature("Parallel: tensor", "cpu")),
        pytest.param("pipeline", marks=pytest.mark.feature("Parallel: pipeline", "cpu")),
        "references",
    ],
)
def test_the_tokens_are_those_of_one_process_with_kernels(results: dict[str, Result], way: str) -> None:
    assert tokens(results[way]) == tokens(results["one"])
    one, two = results["one"]["batches"][0], results[way]["batches"][0]
    for single, double in zip(one, two, strict=True):
        assert double["logprobs"] == pytest.approx(single["logprobs"], abs=1e-3)


@pytest.mark.feature("Sleep: several workers", "cpu")
def test_workers_sleep_together_or_not_at_all(results: dict[str, Result]) -> None:
    steps = list(zip(ASLEEP, results["tensor"]["steps"], strict=True))
    expected = tokens(results["tensor"])[0]
    assert [[output["token_ids"] for output in done] for step, done in steps if step is AGAIN] == [expected] * 4
    [error] = [done for step, done in steps if "try to sleep" in step]
    assert "rank 1: no room for the weights" in error
    looks = [done for step, done in steps if step is LOOK]
    for awake, asleep in zip(looks[::2], looks[1::2], strict=True):
        assert all(before - now > 0.8 * WEIGHTS for before, now in zip(awake, asleep, strict=True)), looks


def test_answers_differ_from_each_other(results: dict[str, Result]) -> None:
    answers = tokens(results["one"])[0]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    assert all(len(set(answer)) > 4 for answer in answers), "a constant answer would hide a wrong cache"


def test_references_took_the_place_of_every_kernel(results: dict[str, Result]) -> None:
    [[used]] = results["references"]["steps"]
    assert set(used) == {"reference"} and used["reference"] > 20
