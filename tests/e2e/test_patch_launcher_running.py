"""Tests the patch serve_http in a running server."""

from __future__ import annotations

import re
import signal

import pytest
from ending_servers import HANG_SECONDS, TWO_WORKERS, Request, Starter, processes_titled, wait_for_exit

pytestmark = [pytest.mark.server, pytest.mark.models]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "the server exits because its engine died. if no error above"),
        pytest.param(signal.SIGBUS, "the server exits because its engine died of sigbus", marks=pytest.mark.exhaustive),
    ],
    ids=["SIGKILL", "SIGBUS"],
)
def test_a_killed_engine_ends_the_server(start: Starter, number: int, reason: str) -> None:
    server = start(warm=False)
    (engine,) = processes_titled(server, "EngineCore")
    request = Request(server)
    server.descendants()
    engine.send_signal(number)
    status = wait_for_exit(server)
    assert status != 0, "the exit status must report the failure"
    log = server.text().lower()
    assert re.search(r"engine ?core.* (died|exited unexpectedly)", log), "the log must report the death of the engine"
    assert reason in log, "no other error may end the server"
    request.must_have_failed()


def test_ctrl_c_waits_for_no_stream(start: Starter) -> None:
    """Tests Ctrl-C during a stream. A terminal signals all processes of the foreground group, also the engine."""
    server = start(*TWO_WORKERS, warm=False)
    request = Request(server)
    server.descendants()
    server.signal_group(signal.SIGINT)
    wait_for_exit(server)
    request.join(HANG_SECONDS)
    assert not request.is_alive(), "the client must not hang"
