"""Tests that greedy fp32 output equals that of transformers, with and without chunked prefill and prefix caching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import prompts
import pytest
import reference
from engine import Result, batch, greedy, job, run_engines

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 40
FEWER = 24
"""Output tokens of the other runs: enough for a second KV block, and some more."""
CHUNK = 128
"""Largest number of tokens in a step of the engine with chunked prefill."""


class Case:
    """Holds the prompts in tokens, and the outputs of transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.short: list[list[int]] = [tokenizer.encode(text) for text in prompts.SHORT]
        self.long: list[list[int]] = [tokenizer.encode(prompts.PASSAGE + text) for text in prompts.QUESTIONS]
        self.all = [*self.short, *self.long]
        self.alone = self.short[::3]
        self.mixed = [*self.alone, *self.long]
        model = reference.load(folder)
        self.expected = [
            *reference.continue_together(model, self.short, TOKENS),
            *reference.continue_together(model, self.long, TOKENS),
        ]

    def expected_for(self, ids: list[int]) -> reference.Continuation:
        """Returns the output of transformers for a prompt."""
        return self.expected[self.all.index(ids)]


@pytest.fixture(scope="module")
def case(smollm2: Path) -> Case:
    return Case(smollm2)


@pytest.fixture(scope="module")
def results(case: Case, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    sampling = greedy(FEWER)
    defaults: dict[str, Any] = {"skip_tokenizer_init": False, "num_gpu_blocks_override": None}  # those of vLLM
    whole = job(
        smollm2,
        batch(case.all, greedy(TOKENS)),
        batch(case.alone, sampling, one_by_one=True),
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        **defaults,
    )
    cut = job(
        smollm2,
        batch(case.long[:1], sampling),
        batch(case.long, sampling, one_by_one=True),
        batch(case.mixed, sampling),
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=True,
        **defaults,
    )
    # In a new interpreter with unmodified vLLM, like the program of a user.
    return run_engines(tmp_path_factory.mktemp("parity"), [whole, cut], warm=False)


def test_there_are_enough_prompts_and_some_are_long(case: Case) -> None:
    assert len({tuple(ids) for ids in case.all}) >= 20
    assert min(map(len, case.all)) == 1
    assert all(len(ids) > 4 * CHUNK for ids in case.long)


def test_no_expected_token_is_a_tie(case: Case) -> None:
    """Tests that no expected token is near a tie, where rounding could choose another token."""
    assert min(answer.smallest_margin for answer in case.expected) > 1e-3


@pytest.mark.feature("Model family: Llama", "cpu")
@pytest.mark.parametrize(
    ("engine", "number", "which"),
    [
        pytest.param(0, 0, lambda case: case.all, id="whole prompts, batched"),
        pytest.param(0, 1, lambda case: case.alone, id="whole prompts, one by one"),
        pytest.param(1, 0, lambda case: case.long[:1], id="chunked prefill, first time"),
        pytest.param(1, 1, lambda case: case.long, id="chunked prefill, one by one, prefix hits"),
        pytest.param(1, 2, lambda case: case.mixed, id="chunked prefill, batched, prefix hits"),
    ],
)
def test_tokens_equal_transformers(
    case: Case, results: list[Result], engine: int, number: int, which: Callable[[Case], list[list[int]]]
) -> None:
    done = results[engine]["batches"][number]
    given = which(case)
    assert len(done) == len(given)
    for ids, output in zip(given, done, strict=True):
        expected = case.expected_for(ids)
        assert len(output["token_ids"]) == (TOKENS if (engine, number) == (0, 0) else FEWER)
        assert output["token_ids"] == expected.token_ids[: len(output["token_ids"])], difference(ids, output, expected)


def difference(ids: list[int], output: dict[str, Any], expected: reference.Continuation) -> str:
    """Describes where an output first differs from the expected one."""
    pairs = zip(output["token_ids"], expected.token_ids, strict=False)
    place = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
    return f"prompt of {len(ids)} tokens, first difference at output token {place}"


@pytest.mark.feature("Serving: async scheduling off", "cpu")
def test_tokens_equal_transformers_without_async_scheduling(case: Case, results: list[Result]) -> None:
    """Tests the default of the cpu device: async scheduling is off, because the device has no streams."""
    assert [result["async_scheduling"] for result in results] == [False, False]
    answers = [output["token_ids"] for output in results[0]["batches"][0]]
    assert answers == [case.expected_for(ids).token_ids for ids in case.all]


def test_fp32_ran_as_fp32(results: list[Result]) -> None:
    assert [result["dtype"] for result in results] == ["torch.float32", "torch.float32"]


def test_prefixes_were_reused(case: Case, results: list[Result]) -> None:
    """Tests that the prefix cache had hits, without which the tests above would not test it."""
    whole, cut = results
    assert all(not output["num_cached_tokens"] for done in whole["batches"] for output in done)
    first, again, together = cut["batches"]
    assert not first[0]["num_cached_tokens"]
    shared = len(case.long[0]) - 64
    assert all(output["num_cached_tokens"] >= shared for output in again)
    assert all(output["num_cached_tokens"] >= shared for output in together[-len(case.long) :])
