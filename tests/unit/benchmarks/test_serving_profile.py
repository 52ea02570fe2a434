"""Processor time of a server under load is divided among those who took it, over the time of the load alone."""

from __future__ import annotations

import pytest

from benchmarks.compare.drivers import EngineFailure
from benchmarks.serving import ENGINE, Profile, Thread, divided, table

FIRST, KERNELS, OUTPUT = (ENGINE, 10, True), (ENGINE, 11, False), (ENGINE, 12, False)
SERVER, CLIENT = ("server", 20, True), ("client", 30, True)


def looks() -> list[tuple[float, dict[Thread, float]]]:
    """Four seconds in which the client imports, ten of load, two in which it ends; the server was busy before."""
    found: list[tuple[float, dict[Thread, float]]] = []
    for moment in range(17):
        load = min(max(moment - 4, 0), 10)
        used = {FIRST: 7 + 0.9 * load, KERNELS: 5 + 0.8 * load, SERVER: 9 + 0.1 * load}
        if moment:  # a thread that is there from then on
            used |= {OUTPUT: 0.05 * load, CLIENT: float(min(moment, 4)) + 0.2 * load + max(0, moment - 14)}
        found.append((float(moment), used))
    return found


def test_the_time_of_the_load_counts() -> None:
    found = divided(looks(), 10.0)
    assert found == {
        "engine, first thread": pytest.approx(9.0),
        "engine, other threads of kernels": pytest.approx(8.0),
        "client": pytest.approx(2.0),
        "server": pytest.approx(1.0),
        "engine, rest": pytest.approx(0.5),
    }


def test_a_server_that_does_nothing_is_no_profile() -> None:
    with pytest.raises(EngineFailure, match="in 2 looks the server was never seen to work"):
        divided([looks()[0]] * 2, 10.0)


def test_what_nobody_took_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.serving.cores", lambda: 2)
    text = table(Profile(160.0, 10.0, {"engine, first thread": 9.0, "client": 2.0}))
    assert "160 tokens/s, 10.0 s on 2 cores" in text
    assert "| idle, or others | 9.0 | 45 % |" in text
