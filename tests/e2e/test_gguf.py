"""GGUF files served as they are, compared with transformers on the weights that the files hold."""

from __future__ import annotations

from typing import Any

import gguf_models
import pytest
import reference
from engine import Result, batch, greedy, insist_on_backplane, job, try_engines

pytestmark = pytest.mark.server

EVERY_TYPE, TWO_WORKERS = "every type, from the parts in a folder", "two workers"
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)]]
TOKENS = 8
TOLERANCE = 1e-3
ROUNDED = 0.03
"""Of log-probabilities where the inputs of products are rounded to 8 bits, in the mean."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Result]]:
    """(transformers' model, the engine's result) by name; one process runs all engines."""
    models, jobs = {}, []
    folder = tmp_path_factory.mktemp("gguf")
    work = batch(PROMPTS, greedy(TOKENS, logprobs=0))
    limits: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    for name, tiny in gguf_models.MODELS.items():
        path = folder / f"{name}.gguf"
        models[name] = tiny.write(path)
        jobs.append(job(path, work, **limits))
    parts = folder / "parts"
    parts.mkdir()
    models[EVERY_TYPE] = gguf_models.EVERY_TYPE.write(parts / "every.gguf", tensors_per_part=9)
    assert len(list(parts.iterdir())) > 2
    jobs.append(job(parts, work, **limits))
    models[TWO_WORKERS] = gguf_models.SHARED_OUT.write(folder / "two.gguf")
    jobs.append(job(folder / "two.gguf", work, **limits, tensor_parallel_size=2))
    variables = {"BACKPLANE_CACHE": str(folder / "cache")}
    results, _log = try_engines(tmp_path_factory.mktemp("engines"), jobs, variables)
    return {name: (models[name], result) for name, result in zip(models, results, strict=True)}


@pytest.mark.feature("Weights: GGUF", "cpu")
@pytest.mark.parametrize("name", [*gguf_models.MODELS, EVERY_TYPE, TWO_WORKERS])
def test_answers_equal_transformers(outcomes: dict[str, tuple[Any, Result]], name: str) -> None:
    model, result = outcomes[name]
    assert "error" not in result, result["error"]
    insist_on_backplane(result)
    for ids, output in zip(PROMPTS, result["batches"][0], strict=True):
        answer = output["token_ids"]
        # What transformers gives to the engine's own tokens: one near tie does not spoil what follows.
        expected = reference.prompt_logprobs(model, [*ids, *answer])[len(ids) - 1 :]
        differences = [abs(one - other) for one, other in zip(output["logprobs"], expected, strict=True)]
        if name in (EVERY_TYPE, TWO_WORKERS):
            assert sum(differences) / len(differences) < ROUNDED, differences
        else:
            assert max(differences) < TOLERANCE, differences
            assert reference.continue_without_cache(model, ids, 1).token_ids == answer[:1]
