"""Tests a model architecture from another package (docs/serve/out-of-tree-models.md) against plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import example_packages
import parallel_decoder_reference as plain
import pytest
from processes import environment, on_path
from reference import Continuation
from server import Server

from tests import programs

pytestmark = pytest.mark.server

TOKENS = 16
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)], [311]]
LIMITS = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--dtype", "float32")
WORKERS = {"cpu": 1, "sim": 2}
VARIABLES = {
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_MEMORY": "1GiB",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_packages.install("parallel_decoder", tmp_path_factory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Continuation]]:
    """Returns the folder of a checkpoint, and the outputs of plain PyTorch for each prompt."""
    folder = tmp_path_factory.mktemp("parallel")
    weights = plain.save(folder, seed=11)
    expected = [plain.continue_greedily(weights, prompt, TOKENS) for prompt in PROMPTS]
    assert min(answer.smallest_margin for answer in expected) > 5e-3, "near a tie; change the seed"
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        usual = plain.continue_greedily(weights, prompt, TOKENS, in_sequence=True)
        assert usual.token_ids != answer.token_ids, "a parallel and a sequential MLP must differ"
    return folder, expected


@pytest.mark.feature("Model family: a model from another package", "{device}")
@pytest.mark.parametrize("device", WORKERS)
def test_it_is_served(device: str, installed: Path, model: tuple[Path, list[Continuation]], tmp_path: Path) -> None:
    folder, expected = model
    given = (str(folder), "--served-model-name", "tiny", "--skip-tokenizer-init", *LIMITS)
    workers = ("--tensor-parallel-size", str(WORKERS[device]))
    variables = {"BACKPLANE_DEVICE": device, "PYTHONPATH": on_path(installed), **VARIABLES}
    request = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with Server(tmp_path, *given, *workers, variables=variables) as server:
        assert server.text().count(f"Operators on device {device}") == WORKERS[device]
        response = server.http.post("/v1/completions", json=request | {"prompt": PROMPTS})
        assert response.status_code == 200, response.text
    tokens = [choice["token_ids"] for choice in response.json()["choices"]]
    assert tokens == [continuation.token_ids for continuation in expected]


LOAD_TWICE = """
import json
import vllm.plugins
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm import ModelRegistry

def state():
    registries = {"architectures": ModelRegistry.models, "configurations": CONFIG_MAPPING._extra_content}
    return {kind: {name: id(found) for name, found in registry.items()} for kind, registry in registries.items()}

states = [state()]
for _ in range(2):
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    states.append(state())
print(json.dumps(states))
"""


def test_the_second_time_registers_nothing(installed: Path) -> None:
    """Tests that loading plugins twice in one process registers the model and its configuration exactly once."""
    variables = environment(PYTHONPATH=on_path(installed), VLLM_PLUGINS="parallel_decoder", VLLM_LOGGING_LEVEL="ERROR")
    run = programs.run(programs.command(LOAD_TWICE), env=variables)
    assert run.returncode == 0, run.stderr
    before, first, second = json.loads(run.stdout.splitlines()[-1])
    added = {kind: first[kind].keys() - before[kind].keys() for kind in first}
    assert added == {"architectures": {"ParallelDecoderForCausalLM"}, "configurations": {"parallel_decoder"}}
    assert second == first
