"""Tests engines with GGUF files against transformers with the weights of the files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf_models
import lora_adapters
import pytest
import reference
import torch
from engine import Result, batch, greedy, job, require_backplane, run_engines, try_engines
from model_spec import COMMON

pytestmark = pytest.mark.server

EVERY_TYPE, TWO_WORKERS = "every type, from the parts in a folder", "two workers"
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)]]
TOKENS = 8
LIMITS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
BLOCKS, EXPERTS = "Gemma", "Mixtral"
ADAPTED: dict[str, dict[str, Any]] = {
    BLOCKS: {},
    EXPERTS: {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}
"""Models that are also served with a LoRA adapter, with the engine arguments for it."""
TOLERANCE = 1e-3
ROUNDED = 0.05
"""Largest allowed mean difference of log-probabilities where the inputs of matrix products are rounded to 8 bits.
Measured: 0.009 to 0.029."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Result]]:
    """Returns the transformers model and the engine's result by name. One process runs all engines."""
    models, jobs = {}, []
    folder = tmp_path_factory.mktemp("gguf")
    work = batch(PROMPTS, greedy(TOKENS, logprobs=0))
    for name, tiny in gguf_models.MODELS.items():
        path = folder / f"{name}.gguf"
        models[name] = tiny.write(path)
        more = adapted(folder, name, models[name]) if name in ADAPTED else {}
        jobs.append(job(path, work, **LIMITS, tensor_parallel_size=tiny.workers, **more))
    parts = folder / "parts"
    parts.mkdir()
    models[EVERY_TYPE] = gguf_models.EVERY_TYPE.write(parts / "every.gguf", tensors_per_part=9)
    assert len(list(parts.iterdir())) > 2
    jobs.append(job(parts, work, **LIMITS))
    models[TWO_WORKERS] = gguf_models.ONE_KV_HEAD.write(folder / "two.gguf")
    # The second count follows when both workers have read the table: a page counts half only if both have it.
    two = {"steps": [{"rpc": "mapped_table"}] * 2, "tensor_parallel_size": gguf_models.ONE_KV_HEAD.workers}
    jobs.append(job(folder / "two.gguf", work, **LIMITS, **two))
    variables = {"BACKPLANE_CACHE": str(folder / "cache")}
    results, _log = try_engines(tmp_path_factory.mktemp("engines"), jobs, variables)
    return {name: (models[name], result) for name, result in zip(models, results, strict=True)}


def adapted(folder: Path, name: str, model: Any) -> dict[str, Any]:
    """Returns job arguments with two adapters: one that half of a batch uses, and one for an expert.

    The engine must refuse to load the second one.
    """
    made = lora_adapters.make(folder / f"{name}-adapter", model, 8, lora_adapters.ATTENTION, 0.5, seed=3)
    model.adapter = [made]  # in a list, so that PyTorch does not register it as a submodule
    expert = "model.layers.0.block_sparse_moe.experts.1.w1"
    factors = {expert: (torch.ones(8, COMMON["hidden_size"]), torch.ones(COMMON["intermediate_size"], 8))}
    lora_adapters.write(folder / f"{name}-expert", 8, 16, factors, ("w1",))
    given = ["good", 1, str(made.folder)]
    work = {**batch(PROMPTS * 2, greedy(TOKENS, logprobs=0)), "adapters": [given] * 2 + [None] * 2}
    steps = [{"load adapter": given}, {"load adapter": ["expert", 2, str(folder / f"{name}-expert")]}, {"batch": work}]
    return {"steps": steps, "enable_lora": True, "max_lora_rank": 8, **ADAPTED[name]}


@pytest.fixture(scope="module")
def on_sim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Result]]:
    """Returns the transformers model and the result on the simulated card, by name."""
    folder = tmp_path_factory.mktemp("sim")
    models: dict[str, Any] = {EVERY_TYPE: gguf_models.EVERY_TYPE.write(folder / "every.gguf")}
    jobs = [job(folder / "every.gguf", batch(PROMPTS, greedy(TOKENS, logprobs=0)), **LIMITS)]
    for name in ADAPTED:
        path = folder / f"{name}.gguf"
        models[name] = gguf_models.MODELS[name].write(path)
        jobs.append(job(path, **LIMITS, **adapted(folder, name, models[name])))
    variables = {"BACKPLANE_CACHE": str(folder / "cache"), "BACKPLANE_SIM_FALLBACK": "forbid"}
    results = run_engines(folder, jobs, {"BACKPLANE_DEVICE": "sim", **variables}, device="sim")
    return {name: (models[name], result) for name, result in zip(models, results, strict=True)}


def shown(device: str) -> Any:
    """Returns the feature marks for a test that serves the file with a matrix of every type."""
    return [pytest.mark.feature(f"Format: GGUF: {one.name}", device) for one in gguf_models.EVERY_TYPE.types]


@pytest.mark.parametrize("name", [*gguf_models.MODELS, pytest.param(EVERY_TYPE, marks=shown("cpu")), TWO_WORKERS])
def test_answers_equal_transformers(outcomes: dict[str, tuple[Any, Result]], name: str) -> None:
    model, result = outcomes[name]
    assert "error" not in result, result["error"]
    require_backplane(result)
    compare(model, result["batches"][0], rounded=name not in gguf_models.MODELS or gguf_models.MODELS[name].rounded)


def test_two_workers_share_what_is_not_repacked(outcomes: dict[str, tuple[Any, Result]]) -> None:
    """Tests that two workers share the pages of the mapped file from which they look up embeddings."""
    first, workers = outcomes[TWO_WORKERS][1]["steps"]
    assert len(workers) == 2 and len({one["process"] for one in workers}) == 2
    for one in first:
        assert one["before"] < one["Size"] / 2, one  # pages of repacked tensors are not resident any more
    for one in workers:
        assert one["path"].endswith("/two.gguf") and one["Rss"] == one["Size"]
        assert one["Private_Dirty"] == one["Anonymous"] == 0, one
    assert sum(one["Pss"] for one in workers) <= workers[0]["Size"] + 2, workers  # in KiB, each rounded


@pytest.mark.parametrize("name", [pytest.param(EVERY_TYPE, marks=shown("sim"))])
def test_another_device_serves_it(on_sim: dict[str, tuple[Any, Result]], name: str) -> None:
    model, result = on_sim[name]
    assert result["device"] == "bpnpu"
    compare(model, result["batches"][0], rounded=True)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        pytest.param(device, name, marks=pytest.mark.feature(f"LoRA: {feature}", device))
        for device in ("cpu", "sim")
        for name, feature in ((BLOCKS, "weights from a GGUF file"), (EXPERTS, "attention of a mixture of experts"))
    ],
)
def test_an_adapter_beside_the_model(request: pytest.FixtureRequest, device: str, name: str) -> None:
    """Tests a batch with and without an adapter: the outputs are those of the merged model and of the model itself."""
    model, result = of_device(request, device)[name]
    assert "error" not in result, result["error"]
    loaded, _refused, outputs = result["steps"]
    assert loaded == ""
    merged, rounded = copy.deepcopy(model), gguf_models.MODELS[name].rounded
    model.adapter[0].merge(merged)
    compare(merged, outputs[:2], rounded=rounded)
    compare(model, outputs[2:], rounded=rounded)
    with pytest.raises(AssertionError):  # the adapter must change the outputs
        compare(model, outputs[:2], rounded=rounded)


@pytest.mark.feature("LoRA: experts", "{device}", refused=True)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_adapter_of_an_expert_is_refused(request: pytest.FixtureRequest, device: str) -> None:
    """Tests the error for an adapter of an expert; vLLM alone would load it and ignore its weights for the expert."""
    _loaded, refused, _outputs = of_device(request, device)[EXPERTS][1]["steps"]
    assert "LoRA adapter 'expert' cannot be used" in refused and "experts take no adapter" in refused


def of_device(request: pytest.FixtureRequest, device: str) -> dict[str, tuple[Any, Result]]:
    """Returns the results of a device."""
    found: dict[str, tuple[Any, Result]] = request.getfixturevalue("outcomes" if device == "cpu" else "on_sim")
    return found


def compare(model: Any, outputs: list[dict[str, Any]], *, rounded: bool) -> None:
    """Fails unless the outputs are those of the transformers model, within the tolerance."""
    differences = []
    for ids, output in zip(PROMPTS, outputs, strict=True):
        answer = output["token_ids"]
        # transformers scores the engine's own tokens, so that a near tie does not affect the tokens after it.
        expected = reference.prompt_logprobs(model, [*ids, *answer])[len(ids) - 1 :]
        differences += [abs(one - other) for one, other in zip(output["logprobs"], expected, strict=True)]
        if not rounded:
            assert reference.continue_without_cache(model, ids, 1).token_ids == answer[:1]
    print(f"log-probabilities differ by {sum(differences) / len(differences):.4f}, at most {max(differences):.4f}")
    if rounded:
        assert sum(differences) / len(differences) < ROUNDED, differences
    else:
        assert max(differences) < TOLERANCE, differences


def test_a_file_that_changes_while_it_is_served(tmp_path: Path) -> None:
    """Tests that the engine ends with the reason, instead of a signal or wrong tokens."""
    ways = ("shorten file", "overwrite file")
    work = {"batch": batch(PROMPTS, greedy(TOKENS))}
    jobs = []
    for way in ways:
        path = tmp_path / f"{way}.gguf"
        gguf_models.ONE_KV_HEAD.write(path)
        jobs.append(job(path, steps=[work, {way: str(path)}, work], **LIMITS))
    results, log = try_engines(tmp_path, jobs, {"BACKPLANE_CACHE": str(tmp_path / "cache")})
    for way, result in zip(ways, results, strict=True):
        assert "EngineDeadError" in result["error"], result
        assert f"CheckpointError: {tmp_path}/{way}.gguf was changed while it is served" in log.read_text()
