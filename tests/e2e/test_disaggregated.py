"""Tests disaggregated prefill and decode: one server computes prompts, and another one fetches their KV blocks.

The servers and requests are those of docs/serve/disaggregated.md. The servers communicate over loopback, through a
relay that injects faults. The output must always be that of transformers.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import reference
from processes import SIM
from server import Server

from tests.breaking_relay import Fault, Relay
from tests.ports import free_address

pytestmark = [pytest.mark.server, pytest.mark.models]

FEATURE = "KV cache: disaggregated prefill and decode"
TOKENS = 8
LENGTH = 150
FULL_BLOCKS = LENGTH // 16
BLOCK = 17 + (32 << 10)
"""Bytes of a KV block of the tiny model in a response, with its header. A status byte precedes the first block."""
TIMEOUT = 10.0
LOGPROBS = 1e-3
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "disaggregated.md").read_text()
DEVICES = {
    "cpu": {},
    "sim": SIM,
}
LIMITS = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--dtype", "float32")
CACHE = ("--kv-cache-memory-bytes", str(64 << 20))
"""An explicit size of the KV cache. Otherwise two servers that start at the same time would each take half of the free
memory."""


class Case:
    """Holds prompts and the outputs of transformers. A test uses its own prompts, which no server has cached before."""

    def __init__(self, folder: Path) -> None:
        drawn = random.Random(11)
        self.prompts = [[drawn.randrange(100, 40000) for _ in range(LENGTH)] for _ in range(8)]
        self.expected = reference.continue_together(reference.load(folder), self.prompts, TOKENS)


# On both devices the same code transfers KV blocks. A KV cache that is not in the host's memory is saved and loaded by
# test_kv_offload.py.
@pytest.fixture(
    scope="module",
    params=["cpu", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in DEVICES if name != "cpu")],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(tiny_llama: Path) -> Case:
    return Case(tiny_llama)


class Pair:
    """Holds a prefill server and a decode server, with the relay between them."""

    def __init__(self, prefill: Server, decode: Server, relay: Relay) -> None:
        self.prefill, self.decode, self.relay = prefill, decode, relay

    def counts(self) -> dict[str, int]:
        """Returns how many KV blocks the decode server has handled, by outcome."""
        outcomes = ("loaded", "fetched", "damaged", "missing", "unreachable")
        return {name: int(self.decode.metric("backplane:kv_offload_blocks_total", outcome=name)) for name in outcomes}

    def change(self, before: dict[str, int]) -> dict[str, int]:
        """Returns the counts that have changed since `before`, with the differences."""
        return {name: count - before[name] for name, count in self.counts().items() if count != before[name]}

    def compute_prompt(self, prompt: Sequence[int]) -> None:
        """Sends a prompt to the prefill server."""
        complete(self.prefill, prompt, 1)

    def generate(self, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        """Returns the tokens and log-probabilities of the decode server."""
        return complete(self.decode, prompt, TOKENS)


def complete(server: Server, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
    """Returns the tokens and log-probabilities of a greedy completion."""
    choice = server.complete(prompt, tokens, logprobs=0)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.fixture(scope="module")
def pair(device: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    listen = free_address()
    documented = re.findall(r"^vllm-backplane serve --port \d+ --kv-transfer-config '(.*)'$", PAGE, re.MULTILINE)
    first, second = (json.loads(text) for text in documented)
    assert first["kv_connector_extra_config"]["listen"] == second["kv_connector_extra_config"]["peer"]
    first["kv_connector_extra_config"] |= {"capacity": "64MiB", "listen": str(listen)}

    def start(transfer: dict[str, Any]) -> Server:
        given = (str(tiny_llama), "--served-model-name", "tiny", *LIMITS, *CACHE)
        arguments = (*given, "--kv-transfer-config", json.dumps(transfer))
        server = Server(tmp_path_factory.mktemp("server"), *arguments, variables=DEVICES[device])
        return running.enter_context(server)

    with ExitStack() as running:
        relay = Relay(listen)
        running.callback(relay.close)
        second["kv_connector_extra_config"] |= {
            "capacity": "64MiB",
            "peer": str(relay.address),
            "peer_timeout": TIMEOUT,
        }
        with ThreadPoolExecutor(2) as pool:  # if one server fails to start, the stack ends the other one
            prefill, decode = pool.map(start, (first, second))
        yield Pair(prefill, decode, relay)


def assert_expected(got: tuple[list[int], list[float]], expected: reference.Continuation) -> None:
    assert got[0] == expected.token_ids
    assert got[1] == pytest.approx(expected.logprobs, abs=LOGPROBS)


def test_the_comparison_would_notice(case: Case) -> None:
    assert min(one.smallest_margin for one in case.expected) > 5e-3, "near a tie; change the seed"
    assert len({tuple(one.token_ids) for one in case.expected}) == len(case.expected)


@pytest.mark.feature(FEATURE, "{device}")
def test_a_prompt_of_the_prefill_server_is_fetched(pair: Pair, case: Case) -> None:
    before = pair.counts()
    hits = pair.decode.metric("vllm:external_prefix_cache_hits_total")
    pair.compute_prompt(case.prompts[0])
    assert_expected(pair.generate(case.prompts[0]), case.expected[0])
    assert pair.change(before) == {"fetched": FULL_BLOCKS}
    assert pair.decode.metric("vllm:external_prefix_cache_hits_total") - hits == FULL_BLOCKS * 16


def test_a_prompt_that_no_server_has_computed(pair: Pair, case: Case) -> None:
    before = pair.counts()
    assert_expected(pair.generate(case.prompts[1]), case.expected[1])
    assert pair.change(before) == {}


@pytest.mark.feature("KV cache: offload to host memory or disk", "{device}")
def test_the_decode_server_keeps_its_own_blocks(pair: Pair, case: Case) -> None:
    """Tests KV offload of the decode server itself. test_kv_offload.py tests a server without a peer."""
    pair.generate(case.prompts[1])
    assert pair.decode.http.post("/reset_prefix_cache").status_code == 200
    before = pair.counts()
    assert_expected(pair.generate(case.prompts[1]), case.expected[1])
    assert pair.change(before) == {"loaded": FULL_BLOCKS}


def test_the_commands_of_the_page(pair: Pair) -> None:
    commands = re.findall(r"^curl -s http://127\.0\.0\.1:(800\d)(\S+) .*\n  -d '(.*)'$", PAGE, re.MULTILINE)
    assert [port for port, *_ in commands] == ["8001", "8002"]
    before = pair.counts()
    for port, path, body in commands:
        server = pair.prefill if port == "8001" else pair.decode
        response = server.http.post(path, json={"model": "tiny", **json.loads(body)})
        assert response.status_code == 200, response.text
    assert pair.change(before)["fetched"] > 0


@pytest.mark.feature(FEATURE, "{device}")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # received data are checked before they reach a device
@pytest.mark.parametrize(
    ("place", "fault", "expected"),
    [
        (2, Fault(1 + 2 * BLOCK + 999, flip=True), {"fetched": FULL_BLOCKS - 1, "damaged": 1}),
        (3, Fault(1 + 3 * BLOCK + 5000), {"fetched": 3, "unreachable": FULL_BLOCKS - 3}),
        (4, Fault(1 + 3 * BLOCK + 5000, hang=3 * TIMEOUT), {"fetched": 3, "unreachable": FULL_BLOCKS - 3}),
    ],
    ids=["damaged", "cut", "hangs"],
)
def test_blocks_lost_in_transfer_are_computed(
    pair: Pair, case: Case, place: int, fault: Fault, expected: dict[str, int]
) -> None:
    """Tests that blocks which arrive damaged or not at all are computed instead.

    The fault does not affect the list of available blocks, because that response is shorter than the fault's offset.
    """
    wait_until_peer_is_used(pair)
    pair.compute_prompt(case.prompts[place])
    before = pair.counts()
    pair.relay.fault = fault
    try:
        assert_expected(pair.generate(case.prompts[place]), case.expected[place])
    finally:
        pair.relay.fault = None
    assert pair.change(before) == expected


def wait_until_peer_is_used(pair: Pair) -> None:
    """Sends new prompts until one is fetched; a peer that failed gets no requests for five seconds."""
    drawn = random.Random()
    for _ in range(40):
        prompt = [drawn.randrange(100, 40000) for _ in range(40)]
        pair.compute_prompt(prompt)
        before = pair.counts()
        pair.generate(prompt)
        if pair.change(before).get("fetched"):
            return
        time.sleep(0.25)
    raise AssertionError("the decode server must fetch blocks from its peer again")


@pytest.mark.feature(FEATURE, "{device}")
def test_the_other_server_is_killed(pair: Pair, case: Case) -> None:
    """Tests the decode server without its peer. It must be the last test, because it kills the prefill server."""
    wait_until_peer_is_used(pair)
    for place in (5, 6):
        pair.compute_prompt(case.prompts[place])
    pair.prefill.kill()
    before = pair.counts()
    for place in (5, 6):
        assert_expected(pair.generate(case.prompts[place]), case.expected[place])
    assert pair.change(before) == {}
    assert "gets no requests for KV blocks for 5 s" in pair.decode.text()
    assert_expected(pair.generate(case.prompts[0]), case.expected[0])
