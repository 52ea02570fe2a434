"""Tests expert parallelism: two workers with whole experts each give the tokens of transformers.

It also tests that the workers divide the cores, even if OMP_NUM_THREADS would allow each worker all of them. Async
scheduling is off; the servers of other tests use the default of their device, or have it on.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reference
from architectures import ARCHITECTURES
from server import LIMITS, Server

from vllm_backplane.host.cores import usable_cores

pytestmark = pytest.mark.server

TOKENS = 16
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)], [9, 8, 7], [311]]
VARIABLES = {
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_MEMORY": "1GiB",
}
WORKERS = 2
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "parallel.md").read_text()
[DIVIDED] = re.findall(r"^vllm-backplane serve \S+ (.*--enable-expert-parallel.*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Returns the folder of the model, and the tokens of transformers for each prompt."""
    folder = tmp_path_factory.mktemp("mixtral")
    built = ARCHITECTURES["Mixtral: two experts of four"].save(folder)
    answers = [reference.continue_without_cache(built, prompt, TOKENS) for prompt in PROMPTS]
    assert min(answer.smallest_margin for answer in answers) > 1e-3, "near a tie; change the prompts"
    return folder, [answer.token_ids for answer in answers]


@pytest.mark.feature("Serving: async scheduling off", "{device}")
@pytest.mark.feature("Parallel: experts", "{device}")
@pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)])
def test_tokens_are_those_of_transformers(device: str, model: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = model
    given = (str(folder), "--served-model-name", "tiny", "--skip-tokenizer-init", *LIMITS)
    divided = (*DIVIDED.split(), "--no-async-scheduling")
    extension = ("--worker-extension-cls", "worker_rpc.OverHttp")
    all_cores = {"OMP_NUM_THREADS": str(usable_cores())} if device == "cpu" else {}
    variables = {"BACKPLANE_DEVICE": device, **VARIABLES, **all_cores}
    with Server(tmp_path, *given, *divided, *extension, variables=variables) as server:
        assert server.text().count(f"Operators on device {device}:") == WORKERS
        assert "Local/global number of experts: 2/4" in server.text()
        info = server.http.get("/server_info", params={"config_format": "json"}).json()
        assert info["vllm_config"]["scheduler_config"]["async_scheduling"] is False
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda prompt: server.complete(prompt, TOKENS), PROMPTS))
        workers = server.http.post("/collective_rpc", json={"method": "rpc_threads"}).json()["results"]
    assert [answer["token_ids"] for answer in answers] == expected
    threads = [worker["threads"] for worker in workers]
    assert len(threads) == WORKERS
    if device == "cpu":
        assert sum(threads) <= max(usable_cores(), WORKERS), "there must not be more threads than cores"
