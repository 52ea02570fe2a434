"""GGUF files served as they are, compared with transformers on the weights that the files hold."""

from __future__ import annotations

from typing import Any

import gguf_models
import pytest
import reference
from engine import Result, batch, greedy, insist_on_backplane, job, run_engines, try_engines
from gguf import GGMLQuantizationType as Type

pytestmark = pytest.mark.server

EVERY_TYPE, TWO_WORKERS = "every type, from the parts in a folder", "two workers"
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)]]
TOKENS = 8
LIMITS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
TOLERANCE = 1e-3
ROUNDED = 0.03
"""Of log-probabilities where the inputs of products are rounded to 8 bits, in the mean."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Result]]:
    """(transformers' model, the engine's result) by name; one process runs all engines."""
    models, jobs = {}, []
    folder = tmp_path_factory.mktemp("gguf")
    work = batch(PROMPTS, greedy(TOKENS, logprobs=0))
    for name, tiny in gguf_models.MODELS.items():
        path = folder / f"{name}.gguf"
        models[name] = tiny.write(path)
        jobs.append(job(path, work, **LIMITS))
    parts = folder / "parts"
    parts.mkdir()
    models[EVERY_TYPE] = gguf_models.EVERY_TYPE.write(parts / "every.gguf", tensors_per_part=9)
    assert len(list(parts.iterdir())) > 2
    jobs.append(job(parts, work, **LIMITS))
    models[TWO_WORKERS] = gguf_models.SHARED_OUT.write(folder / "two.gguf")
    jobs.append(job(folder / "two.gguf", work, **LIMITS, tensor_parallel_size=2))
    variables = {"BACKPLANE_CACHE": str(folder / "cache")}
    results, _log = try_engines(tmp_path_factory.mktemp("engines"), jobs, variables)
    return {name: (models[name], result) for name, result in zip(models, results, strict=True)}


@pytest.fixture(scope="module")
def on_sim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Result]:
    folder = tmp_path_factory.mktemp("sim")
    model = gguf_models.EVERY_TYPE.write(folder / "every.gguf")
    work = job(folder / "every.gguf", batch(PROMPTS, greedy(TOKENS, logprobs=0)), **LIMITS)
    variables = {"BACKPLANE_CACHE": str(folder / "cache"), "BACKPLANE_SIM_FALLBACK": "forbid"}
    [result] = run_engines(folder, [work], {"BACKPLANE_DEVICE": "sim", **variables}, device="sim")
    return model, result


def shown(device: str) -> Any:
    """Marks of the test that serves the file of every type; its norms are F32."""
    types = [*gguf_models.EVERY_TYPE.types, Type.F32]
    return [pytest.mark.feature(f"Format: GGUF: {one.name}", device) for one in types]


@pytest.mark.parametrize("name", [*gguf_models.MODELS, pytest.param(EVERY_TYPE, marks=shown("cpu")), TWO_WORKERS])
def test_answers_equal_transformers(outcomes: dict[str, tuple[Any, Result]], name: str) -> None:
    model, result = outcomes[name]
    assert "error" not in result, result["error"]
    insist_on_backplane(result)
    compare(model, result, rounded=name in (EVERY_TYPE, TWO_WORKERS))


@pytest.mark.parametrize("name", [pytest.param(EVERY_TYPE, marks=shown("sim"))])
def test_another_device_serves_it_through_the_references(on_sim: tuple[Any, Result], name: str) -> None:
    model, result = on_sim
    assert result["device"] == "bpnpu"
    compare(model, result, rounded=True)


def compare(model: Any, result: Result, *, rounded: bool) -> None:
    for ids, output in zip(PROMPTS, result["batches"][0], strict=True):
        answer = output["token_ids"]
        # What transformers gives to the engine's own tokens: one near tie does not spoil what follows.
        expected = reference.prompt_logprobs(model, [*ids, *answer])[len(ids) - 1 :]
        differences = [abs(one - other) for one, other in zip(output["logprobs"], expected, strict=True)]
        if rounded:
            assert sum(differences) / len(differences) < ROUNDED, differences
        else:
            assert max(differences) < TOLERANCE, differences
            assert reference.continue_without_cache(model, ids, 1).token_ids == answer[:1]
