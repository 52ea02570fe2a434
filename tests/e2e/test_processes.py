"""How a server ends: with an error when a worker dies, at once by Ctrl-C; never with anything left behind."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from server import Server

pytestmark = [pytest.mark.server, pytest.mark.models]

LIMIT = 15.0
"""Seconds that the requirement allows between the death of a worker and the end of the server."""

SMALL = (
    "--dtype",
    "float32",
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "64",
)
TWO = ("--tensor-parallel-size", "2")


@pytest.fixture
def start(tiny_llama: Path, tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tiny_llama, tmp_path)
    yield starter
    starter.kill()


class Starter:
    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._servers: list[Server] = []

    def __call__(self, *arguments: str) -> Server:
        server = Server(self._folder, str(self._model), "--served-model-name", "tiny", *SMALL, *arguments)
        self._servers.append(server)
        return server

    def kill(self) -> None:
        for server in self._servers:
            server.kill()


def called(server: Server, name: str) -> list[psutil.Process]:
    """The server's processes whose title holds `name`: VLLM::EngineCore, VLLM::Worker_TP0, …"""
    return [process for process in server.descendants() if name in " ".join(process.cmdline())]


class Request(threading.Thread):
    """A long request in flight; what became of it is in `end`."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._client = server.client()
        self.end: object = None
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(120), "no token came"

    def run(self) -> None:
        try:
            stream = self._client.completions.create(
                model="tiny", prompt="a", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
            )
            for _chunk in stream:
                self.begun.set()
            self.end = "complete"
        except Exception as fault:  # a broken connection shows in several ways; each is the end that is looked for
            self.end = fault

    def must_have_failed(self) -> None:
        self.join(LIMIT)
        assert not self.is_alive(), "the client was left waiting"
        assert self.end != "complete", "the client was told that all was well"


def ends_by_itself(server: Server) -> int:
    """The exit status of a server that ends in time, with everything that it started."""
    end = time.monotonic() + LIMIT
    status = server.wait(LIMIT)
    left = server.wait_for_nothing_left(max(end - time.monotonic(), 0))
    assert not left, f"left behind: {[(process.pid, process.cmdline()) for process in left]}"
    return status


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a request in flight"])
def test_a_killed_worker_ends_the_server(start: Starter, busy: bool) -> None:
    server = start(*TWO)
    workers = called(server, "Worker")
    assert len(workers) == 2, [process.cmdline() for process in server.descendants()]
    request = Request(server) if busy else None
    server.descendants()
    workers[-1].send_signal(signal.SIGKILL)
    ends_by_itself(server)
    log = server.text().lower()
    assert re.search(r"worker.* died", log), "the log does not say that a worker died"
    if request is not None:
        request.must_have_failed()


def test_a_killed_engine_ends_the_server(start: Starter) -> None:
    server = start()
    (engine,) = called(server, "EngineCore")
    request = Request(server)
    server.descendants()
    engine.send_signal(signal.SIGKILL)
    ends_by_itself(server)
    log = server.text().lower()
    assert re.search(r"engine ?core.* (died|exited unexpectedly)", log), "the log does not say that it died"
    request.must_have_failed()


@pytest.mark.parametrize("processes", [(), TWO], ids=["one process", "two workers"])
def test_an_interrupt_of_the_main_process_leaves_nothing(start: Starter, processes: tuple[str, ...]) -> None:
    """What a process manager sends."""
    server = start(*processes)
    assert len(server.descendants()) >= 1 + len(processes)
    server.signal(signal.SIGINT)
    ends_by_itself(server)


IN_FLIGHT = pytest.param(
    True,
    id="with a request in flight",
    # uvicorn, as vLLM starts it, waits without limit for open streams; a race decides whether they are closed first.
    marks=pytest.mark.xfail(strict=False, reason="vLLM's HTTP server may wait for a stream that nobody ends"),
)


@pytest.mark.parametrize("busy", [pytest.param(False, id="idle"), IN_FLIGHT])
def test_ctrl_c_leaves_nothing(start: Starter, busy: bool) -> None:
    """A terminal signals every process of the foreground group."""
    server = start(*TWO)
    assert len(called(server, "Worker")) == 2
    request = Request(server) if busy else None
    server.descendants()
    server.signal_group(signal.SIGINT)
    ends_by_itself(server)
    if request is not None:
        request.join(LIMIT)
        assert not request.is_alive(), "the client was left waiting"
