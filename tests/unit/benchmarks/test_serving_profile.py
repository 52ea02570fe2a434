"""The profile of a server under load has the processor time of each part, during the load only."""

from __future__ import annotations

import pytest

from benchmarks.compare.drivers import EngineFailure
from benchmarks.serving import ENGINE, Profile, Thread, by_part, table

FIRST, KERNELS, OUTPUT = (ENGINE, 10, True), (ENGINE, 11, False), (ENGINE, 12, False)
SERVER, CLIENT = ("server", 20, True), ("client", 30, True)


def samples() -> list[tuple[float, dict[Thread, float]]]:
    """Returns samples of four seconds of the client's imports, ten of load, and two of the client's end."""
    found: list[tuple[float, dict[Thread, float]]] = []
    for moment in range(17):
        load = min(max(moment - 4, 0), 10)
        used = {FIRST: 7 + 0.9 * load, KERNELS: 5 + 0.8 * load, SERVER: 9 + 0.1 * load}
        if moment:  # threads that start after the first sample
            used |= {OUTPUT: 0.05 * load, CLIENT: float(min(moment, 4)) + 0.2 * load + max(0, moment - 14)}
        found.append((float(moment), used))
    return found


def test_the_time_of_the_load_counts() -> None:
    found = by_part(samples(), 10.0)
    assert found == {
        "engine, main thread": pytest.approx(9.0),
        "engine, other kernel threads": pytest.approx(8.0),
        "client": pytest.approx(2.0),
        "server": pytest.approx(1.0),
        "engine, rest": pytest.approx(0.5),
    }


def test_a_server_that_does_nothing_is_no_profile() -> None:
    with pytest.raises(EngineFailure, match="in 2 samples the server never took processor time"):
        by_part([samples()[0]] * 2, 10.0)


def test_time_that_no_thread_took_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.serving.cores", lambda: 2)
    text = table(Profile(160.0, 10.0, {"engine, main thread": 9.0, "client": 2.0}))
    assert "160 tokens/s, 10.0 s on 2 cores" in text
    assert "| idle, or other programs | 9.0 | 45 % |" in text
