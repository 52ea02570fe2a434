"""Tests data and tensor parallelism together: two replicas of two workers each, with a mixture of experts.

The load is uneven, and the tokens must be those of transformers. The experts are divided among all workers, so a step
of one replica needs both workers of the other: an idle replica takes part with dummy batches. Without them the first
request below would hang. test_data_parallel.py tests replicas of one worker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reference
from architectures import ARCHITECTURES
from server import LIMITS, Server

pytestmark = pytest.mark.server

TOKENS = 12
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)], [9, 8, 7], [311]]
UNEVEN = (0, 0, 0, 1)
"""The replica of each prompt."""
VARIABLES = {
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_CARDS": "4",
    "BACKPLANE_SIM_MEMORY": "512MiB",
    "BACKPLANE_MEMORY_SHARE": "0.2",
}
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "parallel.md").read_text()
SIZES = re.findall(r"^vllm-backplane serve \S+ (.*)$", PAGE, re.MULTILINE)[0].split()


@pytest.fixture(scope="module", params=["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Returns the folder of the model, and the tokens of transformers for each prompt."""
    folder = tmp_path_factory.mktemp("mixtral")
    built = ARCHITECTURES["Mixtral: two experts of four"].save(folder)
    answers = [reference.continue_without_cache(built, prompt, TOKENS) for prompt in PROMPTS]
    assert min(answer.smallest_margin for answer in answers) > 1e-3, "near a tie; change the prompts"
    return folder, [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def server(
    device: str, model: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    given = (str(model[0]), "--served-model-name", "tiny", "--skip-tokenizer-init", *LIMITS, *SIZES)
    variables = {"BACKPLANE_DEVICE": device, **VARIABLES}
    with Server(tmp_path_factory.mktemp(device), *given, variables=variables) as running:
        assert running.text().count(f"Operators on device {device}:") == 4
        yield running


def served(server: Server) -> list[float]:
    """Returns the number of generated tokens of each replica."""
    return [server.metric("vllm:generation_tokens_total", engine=str(replica)) for replica in (0, 1)]


@pytest.mark.feature("Parallel: data and tensor together", "{device}")
@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_with_requests_beside_an_idle_one(
    server: Server, model: tuple[Path, list[list[int]]], replica: int
) -> None:
    before = served(server)
    assert server.complete(PROMPTS[1], TOKENS, replica=replica)["token_ids"] == model[1][1]
    after = served(server)
    assert after[replica] - before[replica] == TOKENS
    assert after[1 - replica] == before[1 - replica], "the other replica must stay idle"


@pytest.mark.feature("Parallel: data and tensor together", "{device}")
def test_more_requests_at_one_replica_than_at_the_other(server: Server, model: tuple[Path, list[list[int]]]) -> None:
    before = served(server)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda replica, prompt: server.complete(prompt, TOKENS, replica), UNEVEN, PROMPTS))
    assert [answer["token_ids"] for answer in answers] == model[1]
    assert [now - then for now, then in zip(served(server), before, strict=True)] == [
        UNEVEN.count(replica) * TOKENS for replica in (0, 1)
    ]


def test_every_rank_has_metrics(server: Server) -> None:
    """Tests that the workers of both replicas are told apart, and that each replica's scheduler is under its first."""
    for replica in (0, 1):
        server.complete(PROMPTS[0], TOKENS, replica=replica)
    for rank in "0123":
        assert server.metric("backplane:steps_total", rank=rank, reason="prefill") >= 1
        assert server.metric("backplane:steps_total", rank=rank, reason="several workers") >= TOKENS - 1
        for part in ("inputs", "forward", "sample"):
            assert server.metric("backplane:step_seconds_total", rank=rank, part=part) > 0
        assert server.metric("backplane:device_memory_bytes", rank=rank, kind="used") > 0
        scheduled = server.metric("backplane:step_seconds_total", rank=rank, part="schedule")
        assert (scheduled > 0) == (rank in "02")
    assert server.metric("backplane:device_memory_bytes", rank="4") == 0
