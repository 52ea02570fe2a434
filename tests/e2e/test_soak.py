"""Tests a server under mixed load: the short form of `make soak`, with a tiny model and a small KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from server import LIMITS, Server

from tests.soak import report
from tests.soak.load import BROKEN, SHARES
from tests.soak.run import Record, Sample, soak

pytestmark = [pytest.mark.server, pytest.mark.models]

REQUESTS = 160
STRETCHES = 8


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    small = ("--num-gpu-blocks-override", "80", "--served-model-name", "soak")
    with Server(tmp_path_factory.mktemp("soak"), str(tiny_llama), *LIMITS, *small) as running:
        yield running


@pytest.fixture(scope="module")
def record(server: Server) -> Record:
    return soak(server.address, server.pid, REQUESTS, 16, STRETCHES, lambda record: None, seed=1)


def test_nothing_is_lost_and_nothing_grows(record: Record) -> None:
    assert report.findings(record) == []
    assert record.tally.sent.keys() == SHARES.keys()
    assert sum(record.tally.sent.values()) == REQUESTS
    assert len(record.probes) == 1 + 2 * STRETCHES
    assert record.tally.statuses[200] > REQUESTS / 2
    assert sum(record.tally.statuses[status] for status in range(400, 500)) == record.tally.sent["malformed"]


@pytest.mark.parametrize(("name", "path", "body"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_a_malformed_request_is_the_clients_error(name: str, path: str, body: bytes, server: Server) -> None:
    response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500, response.text


def test_the_results_can_be_saved_and_drawn(record: Record) -> None:
    saved = record.as_json()
    assert saved["tally"]["sent"]["short"] == record.tally.sent["short"]
    assert 0 < saved["latency"]["median"] <= saved["latency"]["99 %"]
    drawn = ElementTree.fromstring(report.plot(record))
    assert len(drawn.findall("{*}polyline")) == 3


def test_every_rule_can_be_broken() -> None:
    """Tests the judgement itself, on a record that is sound and on one change at a time."""

    def made(**changes: list[int]) -> Record:
        sound = [Sample(place, place, 1000, 50, 500, 1.0) for place in range(8)]
        samples = [
            replace(sample, **{name: values[place] for name, values in changes.items()})
            for place, sample in enumerate(sound)
        ]
        return Record(cache_tokens=300, samples=samples, probes=["Tokyo"] * 3)

    assert report.findings(made()) == []
    # The ends are three quarters of the run apart, and the growth of a whole run is judged.
    assert "memory grew by 4.0%" in report.findings(made(memory=[1000] * 6 + [1030] * 2))[0]
    assert report.findings(made(memory=[1000] * 6 + [1014] * 2)) == []
    assert "descriptors grew from 50 to 51" in report.findings(made(descriptors=[50] * 6 + [51] * 2))[0]
    assert "was filled in 2 of 8" in report.findings(made(tokens_computed=[0] * 6 + [450] * 2))[0]
    other = made()
    other.probes.append("Osaka")
    other.tally.lost.append("stream: no end")
    other.tally.server_errors.append("short: status 500")
    assert [text.partition(",")[0] for text in report.findings(other)] == [
        "1 lost",
        "1 server errors",
        "the greedy probe had 2 answers: ['Osaka'",
    ]
