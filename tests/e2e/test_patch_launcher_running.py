"""Tests the patch serve_http in a running server."""

from __future__ import annotations

import re
import signal

import pytest
from endings import AT_LAST, TWO, Request, Starter, called, ends_by_itself

pytestmark = [pytest.mark.server, pytest.mark.models]


def test_a_killed_engine_ends_the_server(start: Starter) -> None:
    server = start(warm=False)
    (engine,) = called(server, "EngineCore")
    request = Request(server)
    server.descendants()
    engine.send_signal(signal.SIGKILL)
    status = ends_by_itself(server)
    assert status != 0, "a supervisor of the server would see success"
    log = server.text().lower()
    assert re.search(r"engine ?core.* (died|exited unexpectedly)", log), "the log does not report that it died"
    assert "the server exits because its engine died" in log, "another error ended it"
    request.must_have_failed()


def test_ctrl_c_waits_for_no_stream(start: Starter) -> None:
    """A terminal signals every process of the foreground group, so the engine and the server stop at once."""
    server = start(*TWO, warm=False)
    request = Request(server)
    server.descendants()
    server.signal_group(signal.SIGINT)
    ends_by_itself(server)
    request.join(AT_LAST)
    assert not request.is_alive(), "the client was left waiting"
