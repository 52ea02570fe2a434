"""Tests data parallelism: two replicas of a mixture of experts, on cpu and on simulated cards.

The load is uneven, and the tokens must be those of transformers. vLLM divides the experts among the replicas, so every
step of one replica needs the other. While only one has requests, the other takes part with dummy batches
(`execute_dummy_batch`). Without them the first request below would hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import reference
from architectures import ARCHITECTURES
from ending_servers import HANG_SECONDS, title
from server import LIMITS, Server

pytestmark = pytest.mark.server

TOKENS = 16
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)], [9, 8, 7], [311]]
VARIABLES = {
    "BACKPLANE_MEMORY_SHARE": "0.2",
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_MEMORY": "1GiB",
    "BACKPLANE_SIM_SYNC_TIMEOUT": "3",  # less than the default, because the last test waits for the timeout
    "BACKPLANE_SIM_FAULTS": "hang@launch=backplane::paged_attention,nth=600,card=1",  # more than other tests launch
}


@pytest.fixture(scope="module", params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def on_sim(device: str) -> None:
    """Skips the test on other devices than the simulated one."""
    if device != "sim":
        pytest.skip("the host has no cards")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns the folder of the model, and the transformers model."""
    folder = tmp_path_factory.mktemp("mixtral")
    return folder, ARCHITECTURES["Mixtral: two experts of four"].save(folder)


@pytest.fixture(scope="module")
def server(device: str, model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    two = ("--data-parallel-size", "2", "--api-server-count", "1", "--skip-tokenizer-init")
    given = (str(model[0]), "--served-model-name", "tiny", *LIMITS, *two)
    variables = {"BACKPLANE_DEVICE": device, **VARIABLES}
    with Server(tmp_path_factory.mktemp(device), *given, variables=variables) as server:
        assert server.text().count(f"Operators on device {device}:") == 2
        yield server


@pytest.mark.feature("Parallel: data, with uneven load", "{device}")
@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_with_requests_beside_an_idle_one(server: Server, model: tuple[Path, Any], replica: int) -> None:
    before = [served(server, other) for other in (0, 1)]
    for prompt in PROMPTS:
        expected = reference.continue_without_cache(model[1], prompt, TOKENS)
        assert expected.smallest_margin > 1e-3, "near a tie; change the prompts"
        assert server.complete(prompt, TOKENS, replica=replica)["token_ids"] == expected.token_ids
    after = [served(server, other) for other in (0, 1)]
    assert after[replica] - before[replica] == len(PROMPTS) * TOKENS
    assert after[1 - replica] == before[1 - replica], "the other replica must stay idle"


def served(server: Server, replica: int) -> float:
    """Returns the number of generated tokens of a replica."""
    return server.metric("vllm:generation_tokens_total", engine=str(replica))


@pytest.mark.usefixtures("on_sim")
def test_each_replica_has_a_card_of_its_own(server: Server) -> None:
    log = server.log.read_text(errors="replace")
    assert all(f"Memory on sim:{card}:" in log for card in (0, 1))


@pytest.mark.usefixtures("on_sim")
def test_a_replica_that_hangs_ends_the_server(server: Server) -> None:
    """Tests that the server ends if a card hangs. It must be the last test, because it ends the server.

    The card of the second replica hangs, and the first replica waits for it in a collective.
    """
    server.descendants()
    answered = False
    for _ in range(100):
        try:
            server.complete(PROMPTS[0], TOKENS, replica=1)
        except (AssertionError, httpx.TransportError):  # the client gets an error response or a broken connection
            break
        answered = True
    else:
        pytest.fail("the card must hang after some requests")
    assert answered, "the card must not hang before this test"
    # A collective would wait for minutes. test_sim_faults.py measures how soon a server ends.
    assert server.wait(HANG_SECONDS) != 0
    left = server.wait_for_nothing_left(HANG_SECONDS)
    assert not left, f"processes are left: {[(process.pid, title(process)) for process in left]}"
    assert "backplane::paged_attention" in server.text()
