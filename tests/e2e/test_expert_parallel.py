"""Experts of a mixture divided among two workers of a server, whole ones to each, give transformers' tokens.

Async scheduling is switched off here; servers of other tests have it as their device does, or on.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reference
from architectures import ARCHITECTURES
from server import LIMITS, Server

pytestmark = pytest.mark.server

TOKENS = 16
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)], [9, 8, 7], [311]]
VARIABLES = {
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_MEMORY": "1GiB",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # not spawned: each process would import all of vLLM again
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder, and transformers' answers."""
    folder = tmp_path_factory.mktemp("mixtral")
    built = ARCHITECTURES["Mixtral: two experts of four"].save(folder)
    answers = [reference.continue_without_cache(built, prompt, TOKENS) for prompt in PROMPTS]
    assert min(answer.smallest_margin for answer in answers) > 1e-3, "near a tie; change the prompts"
    return folder, [answer.token_ids for answer in answers]


@pytest.mark.feature("Serving: async scheduling off", "{device}")
@pytest.mark.feature("Parallel: experts", "{device}")
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_tokens_are_those_of_transformers(device: str, model: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = model
    given = (str(folder), "--served-model-name", "tiny", "--skip-tokenizer-init", *LIMITS)
    divided = ("--tensor-parallel-size", "2", "--enable-expert-parallel", "--no-async-scheduling")
    with Server(tmp_path, *given, *divided, variables={"BACKPLANE_DEVICE": device, **VARIABLES}) as server:
        assert server.text().count(f"Operators on device {device}:") == 2
        assert "Local/global number of experts: 2/4" in server.text()
        told = server.http.get("/server_info", params={"config_format": "json"}).json()
        assert told["vllm_config"]["scheduler_config"]["async_scheduling"] is False
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda prompt: server.complete(prompt, TOKENS), PROMPTS))
    assert [answer["token_ids"] for answer in answers] == expected
