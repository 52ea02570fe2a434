"""One server reads prompts and another one answers, with the KV cache going from one to the other over loopback.

docs/serve/disaggregated.md has the commands; the servers and requests here are the same. Between the two servers is a
relay that injects failures where a test wants them. In every case the output is that of transformers.
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
from server import Server

from tests.breaking_relay import Fault, Relay
from tests.ports import free_address

pytestmark = [pytest.mark.server, pytest.mark.models]

FEATURE = "KV cache: disaggregated prefill and decode"
TOKENS = 8
LENGTH = 150
FULL_BLOCKS = LENGTH // 16
BLOCK = 17 + (720 << 10)
"""Bytes of one of the default model on the way, with its head; before the first is one for the status."""
TIMEOUT = 10.0
LOGPROBS = 1e-3
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve" / "disaggregated.md").read_text()
DEVICES = {
    "cpu": {},
    "sim": {"BACKPLANE_DEVICE": "sim", "BACKPLANE_SIM_FALLBACK": "forbid", "BACKPLANE_SIM_MEMORY": "1GiB"},
}
LIMITS = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--dtype", "float32")
CACHE = ("--kv-cache-memory-bytes", str(64 << 20))
"""Two servers that start at once would each take half of what is free, and leave nothing to others."""


class Case:
    """Prompts for each to be used once: what one server has computed it need not ask for."""

    def __init__(self, folder: Path) -> None:
        drawn = random.Random(11)
        self.prompts = [[drawn.randrange(100, 40000) for _ in range(LENGTH)] for _ in range(8)]
        self.expected = reference.continue_together(reference.load(folder), self.prompts, TOKENS)


@pytest.fixture(scope="module", params=list(DEVICES))
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(device: str, smollm2: Path, tiny_llama: Path) -> Path:
    return {"cpu": smollm2, "sim": tiny_llama}[device]


@pytest.fixture(scope="module")
def case(model: Path) -> Case:
    return Case(model)


class Pair:
    def __init__(self, prefill: Server, decode: Server, relay: Relay) -> None:
        self.prefill, self.decode, self.relay = prefill, decode, relay

    def counts(self) -> dict[str, int]:
        outcomes = ("loaded", "fetched", "damaged", "missing", "unreachable")
        return {name: int(self.decode.metric("backplane:kv_tier_blocks_total", outcome=name)) for name in outcomes}

    def change(self, before: dict[str, int]) -> dict[str, int]:
        return {name: count - before[name] for name, count in self.counts().items() if count != before[name]}

    def read(self, prompt: Sequence[int]) -> None:
        complete(self.prefill, prompt, 1)

    def answer(self, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        return complete(self.decode, prompt, TOKENS)


def complete(server: Server, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
    choice = server.complete(prompt, tokens, logprobs=0)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.fixture(scope="module")
def pair(device: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    listen = free_address()
    documented = re.findall(r"^vllm-backplane serve --port \d+ --kv-transfer-config '(.*)'$", PAGE, re.MULTILINE)
    first, second = (json.loads(text) for text in documented)
    assert first["kv_connector_extra_config"]["listen"] == second["kv_connector_extra_config"]["peer"]
    first["kv_connector_extra_config"] |= {"capacity": "64MiB", "listen": str(listen)}

    def start(transfer: dict[str, Any]) -> Server:
        given = (str(model), "--served-model-name", "tiny", *LIMITS, *CACHE)
        arguments = (*given, "--kv-transfer-config", json.dumps(transfer))
        variables = {"VLLM_SERVER_DEV_MODE": "1", **DEVICES[device]}
        server = Server(tmp_path_factory.mktemp("server"), *arguments, variables=variables)
        return running.enter_context(server)

    with ExitStack() as running:
        relay = Relay(listen)
        running.callback(relay.close)
        second["kv_connector_extra_config"] |= {
            "capacity": "64MiB",
            "peer": str(relay.address),
            "peer_timeout": TIMEOUT,
        }
        with ThreadPoolExecutor(2) as pool:  # both are there, or the stack ends the one that is
            prefill, decode = pool.map(start, (first, second))
        yield Pair(prefill, decode, relay)


def assert_expected(got: tuple[list[int], list[float]], expected: reference.Continuation) -> None:
    assert got[0] == expected.token_ids
    assert got[1] == pytest.approx(expected.logprobs, abs=LOGPROBS)


def test_the_comparison_would_notice(case: Case) -> None:
    assert min(one.smallest_margin for one in case.expected) > 5e-3, "near a tie; change the seed"
    assert len({tuple(one.token_ids) for one in case.expected}) == len(case.expected)


@pytest.mark.feature(FEATURE, "{device}")
def test_what_one_has_read_the_other_answers(pair: Pair, case: Case) -> None:
    before = pair.counts()
    hits = pair.decode.metric("vllm:external_prefix_cache_hits_total")
    pair.read(case.prompts[0])
    assert_expected(pair.answer(case.prompts[0]), case.expected[0])
    assert pair.change(before) == {"fetched": FULL_BLOCKS}
    assert pair.decode.metric("vllm:external_prefix_cache_hits_total") - hits == FULL_BLOCKS * 16


def test_what_nobody_has_read_is_computed(pair: Pair, case: Case) -> None:
    before = pair.counts()
    assert_expected(pair.answer(case.prompts[1]), case.expected[1])
    assert pair.change(before) == {}


@pytest.mark.feature("KV cache: offload to host memory or disk", "{device}")
def test_what_a_server_has_computed_is_in_a_tier_of_its_own(pair: Pair, case: Case) -> None:
    """test_kv_tier.py has a server that asks nobody else."""
    pair.answer(case.prompts[1])
    assert pair.decode.http.post("/reset_prefix_cache").status_code == 200
    before = pair.counts()
    assert_expected(pair.answer(case.prompts[1]), case.expected[1])
    assert pair.change(before) == {"loaded": FULL_BLOCKS}


def test_the_commands_of_the_page(pair: Pair) -> None:
    commands = re.findall(r"^curl -s http://127\.0\.0\.1:(800\d)(\S+) .*\n  -d '(.*)'$", PAGE, re.MULTILINE)
    assert [port for port, *_ in commands] == ["8001", "8002"]
    before = pair.counts()
    for port, path, body in commands:
        server = pair.prefill if port == "8001" else pair.decode
        answer = server.http.post(path, json={"model": "tiny", **json.loads(body)})
        assert answer.status_code == 200, answer.text
    assert pair.change(before)["fetched"] > 0


@pytest.mark.feature(FEATURE, "{device}")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # what is received has not reached a device yet
@pytest.mark.parametrize(
    ("place", "fault", "expected"),
    [
        (2, Fault(1 + 2 * BLOCK + 999, flip=True), {"fetched": FULL_BLOCKS - 1, "damaged": 1}),
        (3, Fault(1 + 3 * BLOCK + 5000), {"fetched": 3, "unreachable": FULL_BLOCKS - 3}),
        (4, Fault(1 + 3 * BLOCK + 5000, hang=3 * TIMEOUT), {"fetched": 3, "unreachable": FULL_BLOCKS - 3}),
    ],
    ids=["damaged", "cut", "hangs"],
)
def test_what_goes_wrong_on_the_way_is_computed(
    pair: Pair, case: Case, place: int, fault: Fault, expected: dict[str, int]
) -> None:
    """Which blocks there are is a shorter answer, to which nothing is done."""
    let_rest_be_over(pair)
    pair.read(case.prompts[place])
    before = pair.counts()
    pair.relay.fault = fault
    try:
        assert_expected(pair.answer(case.prompts[place]), case.expected[place])
    finally:
        pair.relay.fault = None
    assert pair.change(before) == expected


def let_rest_be_over(pair: Pair) -> None:
    """A peer that failed is left alone for five seconds. New prompts are asked until one is fetched."""
    drawn = random.Random()
    for _ in range(40):
        prompt = [drawn.randrange(100, 40000) for _ in range(40)]
        pair.read(prompt)
        before = pair.counts()
        pair.answer(prompt)
        if pair.change(before).get("fetched"):
            return
        time.sleep(0.25)
    raise AssertionError("the other server is not asked any more")


@pytest.mark.feature(FEATURE, "{device}")
def test_the_other_server_is_killed(pair: Pair, case: Case) -> None:
    """The last test of a pair."""
    let_rest_be_over(pair)
    for place in (5, 6):
        pair.read(case.prompts[place])
    pair.prefill.kill()
    before = pair.counts()
    for place in (5, 6):
        assert_expected(pair.answer(case.prompts[place]), case.expected[place])
    assert pair.change(before) == {}
    assert "gets no requests for KV blocks for 5 s" in pair.decode.text()
    assert_expected(pair.answer(case.prompts[0]), case.expected[0])
