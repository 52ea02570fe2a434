"""Tests the device of docs/chip/first-token.md: a separate package (examples/minimal_device) that runs vLLM.

The device has no kernels, so the reference implementations of the operators serve all models, also quantized ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import example_packages
import feature_matrix
import gguf_models
import pytest
import reference
import test_gguf
import test_schemes
from engine import Result, batch, greedy, job, run_engines
from processes import on_path

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 24
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1100)), [40000]]
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
LLAMA, EVERY_TYPE = "Llama", "GGUF, every type"
SCHEMES = ("GPTQ, 4 bits, activation order", "W8A8, experts", "AWQ, 8 bits", "W4A16, experts", "W8A16, experts")
"""Schemes of test_schemes.py: layers that gather their input, experts, and every storage of codes and zero points."""


@pytest.fixture(scope="module")
def outcomes(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Result]]:
    """Returns the transformers model and the engine's result by name. One process runs all engines."""
    installed, folder = example_packages.install("minimal_device", tmp_path_factory), tmp_path_factory.mktemp("models")
    models = {LLAMA: reference.load(tiny_llama), EVERY_TYPE: gguf_models.EVERY_TYPE.write(folder / "every.gguf")}
    models |= {name: test_schemes.write(folder / name, test_schemes.SCHEMES[name]) for name in SCHEMES}
    jobs = [
        job(tiny_llama, batch(PROMPTS, greedy(TOKENS))),
        job(folder / "every.gguf", batch(test_gguf.PROMPTS, greedy(test_gguf.TOKENS, logprobs=0))),
        *test_schemes.jobs_for(folder, *SCHEMES),
    ]
    for one in jobs:
        one["engine"] |= {**LIMITS, "skip_tokenizer_init": True}
        one["steps"] = [{"rpc": "operators"}]
    chosen = {"PYTHONPATH": on_path(installed), "BACKPLANE_DEVICE": "minimal", "BACKPLANE_CACHE": str(folder / "cache")}
    results = run_engines(tmp_path_factory.mktemp("engines"), jobs, chosen, device="minimal")
    return dict(zip(models, zip(models.values(), results, strict=True), strict=True))


def test_it_has_at_most_thirty_lines() -> None:
    assert len((example_packages.EXAMPLES / "minimal_device" / "minimal_device.py").read_text().splitlines()) <= 30


@pytest.mark.parametrize("name", [LLAMA, EVERY_TYPE, *SCHEMES])
def test_everything_runs_as_its_reference(outcomes: dict[str, tuple[Any, Result]], name: str) -> None:
    """Tests that all operators run as references, including `quantized_linear`, which has a kernel on other devices."""
    [counted] = outcomes[name][1]["steps"][0]
    assert counted.keys() == {"reference"}, counted


def test_it_gives_the_tokens_of_transformers(outcomes: dict[str, tuple[Any, Result]]) -> None:
    model, minimal = outcomes[LLAMA]
    expected = [reference.continue_without_cache(model, ids, TOKENS) for ids in PROMPTS]
    assert min(answer.smallest_margin for answer in expected) > 1e-3, "near a tie; change the prompts"
    answers = [output["token_ids"] for output in minimal["batches"][0]]
    assert answers == [answer.token_ids for answer in expected]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)


@pytest.mark.parametrize("name", [pytest.param(EVERY_TYPE, marks=test_gguf.shown(feature_matrix.REFERENCES))])
def test_it_serves_a_gguf_file_with_every_type(outcomes: dict[str, tuple[Any, Result]], name: str) -> None:
    model, result = outcomes[name]
    test_gguf.compare(model, result["batches"][0], rounded=True)


@pytest.mark.parametrize("name", test_schemes.named(feature_matrix.REFERENCES, names=SCHEMES))
def test_it_serves_a_quantized_checkpoint(outcomes: dict[str, tuple[Any, Result]], name: str) -> None:
    model, result = outcomes[name]
    assert test_schemes.distance(result, model) < test_schemes.ROUNDED
