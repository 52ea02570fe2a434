"""Two replicas of a mixture of experts, on the host and on simulated cards, under uneven load: transformers' tokens.

vLLM divides the experts among the replicas, so every step of one needs the other: while only one has requests, the
other takes part with empty steps (`execute_dummy_batch`). Without them the first request below would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import reference
from architectures import ARCHITECTURES
from endings import AT_LAST, title
from server import LIMITS, Server

pytestmark = pytest.mark.server

TOKENS = 16
PROMPTS = [[3, 77, 401, 12], [(17 * place + place * place) % 500 + 5 for place in range(40)], [9, 8, 7], [311]]
VARIABLES = {
    "BACKPLANE_MEMORY_SHARE": "0.2",
    "BACKPLANE_SIM_FALLBACK": "forbid",
    "BACKPLANE_SIM_MEMORY": "1GiB",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # not spawned: each process would import all of vLLM again
    "BACKPLANE_SIM_SYNC_TIMEOUT": "3",  # less than the default: the end is waited for
    "BACKPLANE_SIM_FAULTS": "hang@launch=backplane::paged_attention,nth=600,card=1",  # more than the other tests launch
}


@pytest.fixture(scope="module", params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def on_sim(device: str) -> None:
    if device != "sim":
        pytest.skip("the host has no cards")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
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
    assert after[1 - replica] == before[1 - replica], "the idle replica was not idle"


def served(server: Server, replica: int) -> float:
    return server.metric("vllm:generation_tokens_total", engine=str(replica))


@pytest.mark.usefixtures("on_sim")
def test_each_replica_has_a_card_of_its_own(server: Server) -> None:
    log = server.log.read_text(errors="replace")
    assert all(f"Memory on sim:{card}:" in log for card in (0, 1))


@pytest.mark.usefixtures("on_sim")
def test_a_replica_that_hangs_ends_the_server(server: Server) -> None:
    """The last test: the card of the second replica stops, and the first waits for it in the exchange of tokens."""
    server.descendants()
    answered = False
    for _ in range(100):
        try:
            server.complete(PROMPTS[0], TOKENS, replica=1)
        except (AssertionError, httpx.TransportError):  # the client is told, in one way or another
            break
        answered = True
    else:
        pytest.fail("the card did not stop")
    assert answered, "the card stopped before this test"
    # A collective would wait for minutes. How soon a server ends is measured in test_sim_faults.py.
    assert server.wait(AT_LAST) != 0
    left = server.wait_for_nothing_left(AT_LAST)
    assert not left, f"left behind: {[(process.pid, title(process)) for process in left]}"
    assert "backplane::paged_attention" in server.text()
