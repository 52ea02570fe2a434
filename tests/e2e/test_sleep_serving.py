"""Tests sleep mode over HTTP: memory is released, requests get status 503 meanwhile, and tokens do not change.

The commands and requests are those of docs/serve/sleep.md. test_parallel.py and test_sim_two_cards.py test several
workers.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from processes import SIM
from server import LIMITS, Server

pytestmark = [pytest.mark.server, pytest.mark.models]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "sleep.md").read_text()
PROMPT = list(range(1000, 1040))
CACHE = 64 << 20


class Served(NamedTuple):
    """Holds a server with sleep mode."""

    server: Server
    weights: int
    """Minimum number of bytes of the weights."""
    folder: Path
    """Folder in which the cpu device stores weights during sleep."""


@pytest.fixture(scope="module", params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Starts a server with the default model in full precision."""
    folder = tmp_path_factory.mktemp(device)
    (kept := folder / "kept").mkdir()
    [documented] = re.findall(r"^VLLM_SERVER_DEV_MODE=1 vllm-backplane serve (.*)$", PAGE, re.MULTILINE)
    variables = {**(SIM if device == "sim" else {"BACKPLANE_CPU_SLEEP_FOLDER": str(kept)})}
    arguments = (*documented.split(), *LIMITS, "--kv-cache-memory-bytes", str(CACHE))
    with Server(folder, *arguments, variables=variables) as running:
        assert f"Operators on device {device}:" in running.text()
        yield Served(running, 500 << 20, kept)


def generate(server: Server) -> list[int]:
    """Returns the tokens of a greedy completion, which must not be nearly constant."""
    request = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = server.http.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    assert len(set(tokens)) > 3, "a model without weights would give a constant output"
    return tokens


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    """Sends a POST request, with a body if there are arguments."""
    return server.http.post(path, **({"json": body} if body else {}))


def succeed(server: Server, path: str, **body: Any) -> Any:
    """Sends a POST request, which must succeed, and returns the body of the response."""
    response = post(server, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def resident(server: Server) -> int:
    """Returns the bytes of resident memory of all processes of the server."""
    total = 0
    for process in (psutil.Process(server.pid), *server.descendants()):
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper process of the server has ended
            total += process.memory_info().rss
    return total


def released(server: Server) -> float:
    """Returns the GiB of released memory in the last such line of the log."""
    return float(re.findall(r"Asleep: ([\d.]+) GiB released", server.text())[-1])


@pytest.mark.feature("Sleep: /sleep and /wake_up", "{device}")
@pytest.mark.feature("Sleep: level 1", "{device}")
@pytest.mark.feature("Sleep: a request while asleep gets status 503", "{device}")
def test_level_1(served: Served, device: str) -> None:
    server = served.server
    before = generate(server)
    held = resident(server)
    assert succeed(server, "/sleep?level=1") == {"status": "sleeping", "level": 1}
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    if device == "cpu":
        assert held - resident(server) > 0.9 * served.weights, "the pages must be released"
        assert not list(served.folder.iterdir()), "the file must have no name"
    else:
        assert released(server) * 2**30 > 0.9 * (served.weights + CACHE)
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        refused = post(server, path, **body)
        assert refused.status_code == 503
        assert "POST /wake_up" in refused.json()["error"]["message"]
    assert server.healthy()
    succeed(server, "/tokenize", prompt="Hello")
    succeed(server, "/wake_up")
    assert generate(server) == before


@pytest.mark.feature("Sleep: level 2 and weight reload", "{device}")
def test_the_commands_of_the_page(served: Served, device: str) -> None:
    """Tests both sleep levels with the commands of the page."""
    server = served.server
    before = generate(server)
    commands = re.findall(r"^curl -s -X POST 'http://127\.0\.0\.1:8000(\S+)'(?: -H .* -d '(.*)')?$", PAGE, re.MULTILINE)
    assert len(commands) == 6
    held, asleep = resident(server), []
    for path, body in commands:
        succeed(server, path, **(json.loads(body) if body else {}))
        if path.startswith("/sleep"):
            asleep.append(resident(server))
        elif not server.http.get("/is_sleeping").json()["is_sleeping"]:
            assert generate(server) == before
    if device == "cpu":
        assert all(held - now > 0.9 * served.weights for now in asleep)


def test_what_level_2_gave_up_is_gone(served: Served) -> None:
    """Tests that level 2 discards the weights, without which the test before would not test the reload."""
    server = served.server
    before = generate(server)
    succeed(server, "/sleep?level=2")
    succeed(server, "/wake_up")
    request = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    assert succeed(server, "/v1/completions", **request)["choices"][0]["token_ids"] != before
    succeed(server, "/collective_rpc", method="reload_weights")
    assert post(server, "/reset_prefix_cache").status_code == 200  # it has blocks that were computed without weights
    assert generate(server) == before


def test_a_failed_sleep_is_an_error_and_serving_goes_on(served: Served, device: str) -> None:
    if device != "cpu":
        pytest.skip("the simulated driver writes no files; unit tests cover its failures")
    before = generate(served.server)
    shutil.rmtree(served.folder)
    failed = post(served.server, "/sleep")
    assert failed.status_code == 500
    assert "is not a folder" in failed.json()["error"]["message"]
    assert "BACKPLANE_CPU_SLEEP_FOLDER" in failed.json()["error"]["message"]
    assert generate(served.server) == before
    served.folder.mkdir()
    succeed(served.server, "/sleep")
    succeed(served.server, "/wake_up")
    assert generate(served.server) == before
