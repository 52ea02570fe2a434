"""Architectures with tiny random weights, compared with transformers' fp32 token by token."""

from __future__ import annotations

from typing import Any

import pytest
import reference
from architectures import ARCHITECTURES
from engine import Result, batch, greedy, insist_on_backplane, job, try_engines

pytestmark = pytest.mark.server

TOKENS = 16
PROMPTS = [
    [3, 77, 401, 12],
    [(17 * place + place * place) % 500 + 5 for place in range(40)],
    [(31 * place) % 490 + 7 for place in range(100)],
]
LOGPROB_TOLERANCE = 1e-4
MARGIN = 1e-2
"""Least lead of any token over the second: far above the rounding of any order of summation."""

Outcome = tuple[Any, Result]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """(transformers' model, the engine's result) by architecture; one process runs all engines."""
    models, jobs = {}, []
    work = batch(PROMPTS, greedy(TOKENS, logprobs=0))
    for name, architecture in ARCHITECTURES.items():
        folder = tmp_path_factory.mktemp("model")
        models[name] = architecture.save(folder)
        jobs.append(job(folder, work, skip_tokenizer_init=True, max_num_seqs=4, max_num_batched_tokens=64))
    results, _log = try_engines(tmp_path_factory.mktemp("architectures"), jobs)
    return {name: (models[name], result) for name, result in zip(models, results, strict=True)}


@pytest.mark.feature("Model family: {name}", "cpu")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_transformers(outcomes: dict[str, Outcome], name: str) -> None:
    model, result = outcomes[name]
    assert "error" not in result, result["error"]
    insist_on_backplane(result)
    for ids, output in zip(PROMPTS, result["batches"][0], strict=True):
        expected = reference.continue_without_cache(model, ids, TOKENS)
        assert output["token_ids"] == expected.token_ids
        assert output["logprobs"] == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_comparison_would_notice(name: str) -> None:
    """Without what the architecture is here for, transformers answers otherwise; no answer is constant."""
    whole, without = ARCHITECTURES[name].build(), ARCHITECTURES[name].build_without()
    answers = [reference.continue_without_cache(whole, ids, TOKENS) for ids in PROMPTS]
    others = [reference.continue_without_cache(without, ids, TOKENS) for ids in PROMPTS]
    assert any(answer.token_ids != other.token_ids for answer, other in zip(answers, others, strict=True))
    assert all(len(set(answer.token_ids)) > 3 for answer in answers)
    assert min(answer.smallest_margin for answer in answers) > MARGIN, "near a tie; change the seed"
