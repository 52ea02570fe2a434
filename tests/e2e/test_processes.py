"""How a server ends: with an error when a worker dies, at once by Ctrl-C; never with anything left behind."""

from __future__ import annotations

import re
import signal

import pytest
from endings import TWO, Request, Starter, called, connections, ends_by_itself, socket_files, title

pytestmark = [pytest.mark.server, pytest.mark.models]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a request in flight"])
def test_a_killed_worker_ends_the_server(start: Starter, busy: bool) -> None:
    server = start(*TWO)
    workers = called(server, "Worker")
    assert len(workers) == 2, [title(process) for process in server.descendants()]
    request = Request(server) if busy else None
    server.descendants()
    workers[-1].send_signal(signal.SIGKILL)
    status = ends_by_itself(server)
    assert status != 0, "whoever supervises the server is told that all was well"
    log = server.text().lower()
    assert re.search(r"worker.* died", log), "the log does not say that a worker died"
    assert "the server exits because its engine died" in log, "another error ended it"
    if request is not None:
        request.must_have_failed()


@pytest.mark.parametrize("processes", [(), TWO], ids=["one process", "two workers"])
def test_an_interrupt_of_the_main_process_leaves_nothing(start: Starter, processes: tuple[str, ...]) -> None:
    """What a process manager sends."""
    server = start(*processes)
    assert len(server.descendants()) >= 1 + len(processes)
    held = [held.laddr.port for held in connections(server, "tcp")]
    assert server.port not in held, "a process that serves nobody holds the server's port"
    sockets = socket_files(server)
    assert sockets
    server.signal(signal.SIGINT)
    assert ends_by_itself(server) == 0
    assert not [path for path in sockets if path.parent.exists()]


def test_ctrl_c_leaves_nothing(start: Starter) -> None:
    """A terminal signals every process of the foreground group."""
    server = start(*TWO)
    assert len(called(server, "Worker")) == 2
    server.signal_group(signal.SIGINT)
    assert ends_by_itself(server) == 0


@pytest.mark.parametrize("processes", [(), TWO], ids=["one process", "two workers"])
def test_a_killed_main_process_leaves_nothing(start: Starter, processes: tuple[str, ...]) -> None:
    server = start(*processes)
    assert len(server.descendants()) >= 1 + len(processes)
    server.signal(signal.SIGKILL)
    ends_by_itself(server)


def test_ctrl_c_during_start_up_leaves_nothing(start: Starter) -> None:
    """In the engine, vLLM only takes a note of it until the engine is ready."""
    server = start.slow()
    server.signal_group(signal.SIGINT)
    assert ends_by_itself(server) == 130, "as of a program that Ctrl-C ended"
    assert "Traceback" not in server.text()


def test_an_engine_that_is_told_to_end_is_an_error(start: Starter) -> None:
    """Not a Ctrl-C of the server, although the server's event loop hears of signals to processes forked from it."""
    server = start()
    (engine,) = called(server, "EngineCore")
    engine.send_signal(signal.SIGTERM)
    assert ends_by_itself(server) != 0
