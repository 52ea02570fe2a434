"""A server sleeps and wakes: memory goes back, requests are told so meanwhile, and the tokens stay.

docs/serve/sleep.md has the commands, and the requests here are the same. Several workers: test_parallel.py and
test_sim_two_cards.py.
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
from server import LIMITS, Server

pytestmark = [pytest.mark.server, pytest.mark.models]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "sleep.md").read_text()
PROMPT = list(range(1000, 1040))
SIM = {"BACKPLANE_DEVICE": "sim", "BACKPLANE_SIM_FALLBACK": "forbid", "BACKPLANE_SIM_MEMORY": "2GiB"}
CACHE = 64 << 20


class Served(NamedTuple):
    server: Server
    weights: int
    """Bytes, at least."""
    folder: Path
    """Where the cpu device keeps weights."""


@pytest.fixture(scope="module", params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The default model's weights in full precision."""
    folder = tmp_path_factory.mktemp(device)
    (kept := folder / "kept").mkdir()
    [documented] = re.findall(r"^VLLM_SERVER_DEV_MODE=1 vllm-backplane serve (.*)$", PAGE, re.MULTILINE)
    variables = {"VLLM_SERVER_DEV_MODE": "1", **(SIM if device == "sim" else {"BACKPLANE_CPU_SLEEP_FOLDER": str(kept)})}
    arguments = (*documented.split(), *LIMITS, "--kv-cache-memory-bytes", str(CACHE))
    with Server(folder, *arguments, variables=variables) as running:
        assert f"Operators on device {device}:" in running.text()
        yield Served(running, 500 << 20, kept)


def answer(server: Server) -> list[int]:
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = server.http.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    assert len(set(tokens)) > 3, "an empty model would give the same"
    return tokens


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, **({"json": body} if body else {}))


def succeed(server: Server, path: str, **body: Any) -> Any:
    response = post(server, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def resident(server: Server) -> int:
    total = 0
    for process in (psutil.Process(server.pid), *server.descendants()):
        with contextlib.suppress(psutil.NoSuchProcess):  # a server's helpers come and go
            total += process.memory_info().rss
    return total


def given_back(server: Server) -> float:
    """GiB, by the last worker that said so."""
    return float(re.findall(r"Asleep: ([\d.]+) GiB released", server.text())[-1])


@pytest.mark.feature("Sleep: /sleep and /wake_up", "{device}")
@pytest.mark.feature("Sleep: level 1", "{device}")
@pytest.mark.feature("Sleep: a request while asleep gets status 503", "{device}")
def test_level_1(served: Served, device: str) -> None:
    server = served.server
    before = answer(server)
    held = resident(server)
    assert succeed(server, "/sleep?level=1") == {"status": "sleeping", "level": 1}
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    if device == "cpu":
        assert held - resident(server) > 0.9 * served.weights, "the system has the pages back"
        assert not list(served.folder.iterdir()), "the file has no name"
    else:
        assert given_back(server) * 2**30 > 0.9 * (served.weights + CACHE)
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
    assert answer(server) == before


@pytest.mark.feature("Sleep: level 2 and weight reload", "{device}")
def test_the_commands_of_the_page(served: Served, device: str) -> None:
    """Both levels, as they are written there."""
    server = served.server
    before = answer(server)
    commands = re.findall(r"^curl -s -X POST 'http://127\.0\.0\.1:8000(\S+)'(?: -H .* -d '(.*)')?$", PAGE, re.MULTILINE)
    assert len(commands) == 6
    held, asleep = resident(server), []
    for path, body in commands:
        succeed(server, path, **(json.loads(body) if body else {}))
        if path.startswith("/sleep"):
            asleep.append(resident(server))
        elif not server.http.get("/is_sleeping").json()["is_sleeping"]:
            assert answer(server) == before
    if device == "cpu":
        assert all(held - now > 0.9 * served.weights for now in asleep)


def test_what_level_2_gave_up_is_gone(served: Served) -> None:
    """Or the test before would show nothing."""
    server = served.server
    before = answer(server)
    succeed(server, "/sleep?level=2")
    succeed(server, "/wake_up")
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    assert succeed(server, "/v1/completions", **asked)["choices"][0]["token_ids"] != before
    succeed(server, "/collective_rpc", method="reload_weights")
    assert post(server, "/reset_prefix_cache").status_code == 200  # what was computed without weights
    assert answer(server) == before


def test_a_sleep_that_fails_is_told_and_serving_goes_on(served: Served, device: str) -> None:
    if device != "cpu":
        pytest.skip("the simulated driver keeps no files; its failures are in the unit tests")
    before = answer(served.server)
    shutil.rmtree(served.folder)
    failed = post(served.server, "/sleep")
    assert failed.status_code == 500
    assert "is not a folder" in failed.json()["error"]["message"]
    assert "BACKPLANE_CPU_SLEEP_FOLDER" in failed.json()["error"]["message"]
    assert answer(served.server) == before
    served.folder.mkdir()
    succeed(served.server, "/sleep")
    succeed(served.server, "/wake_up")
    assert answer(served.server) == before
