"""Servers that are about to end: started small, with a request in flight, and watched until nothing is left."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from processes import Child, on_path
from server import COMMAND, START_SECONDS, Server

from tests.ports import free_port

AT_LAST = 60.0
"""Seconds after which a server counts as hanging: vLLM's own timeouts are minutes. Shorter limits would measure the
machine."""

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
SLOW = """
import time

from vllm_backplane.devices.cpu import CpuDevice


class Slow(CpuDevice):
    name = "slow"

    def load_kernels(self):
        time.sleep(600)
"""
TWO = ("--tensor-parallel-size", "2")


class Starter:
    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._base = model, folder
        self._servers: list[Child] = []

    def _folder(self) -> Path:
        """For the next server."""
        made = self._base / str(len(self._servers))
        made.mkdir()
        return made

    def __call__(self, *arguments: str, warm: bool = True) -> Server:
        given = (str(self._model), "--served-model-name", "tiny", *SMALL, *arguments)
        server = Server(self._folder(), *given, warm=warm)
        self._servers.append(server)
        return server

    def slow(self) -> Child:
        """A server whose engine's process has just begun, and will not be ready for minutes."""
        folder = self._folder()
        site = folder / "site"
        metadata = site / "slow_device-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / "slow_device.py").write_text(SLOW)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-device\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[vllm_backplane.devices]\nslow = slow_device:Slow\n")
        command = [COMMAND, "serve", str(self._model), "--port", str(free_port()), *SMALL]
        variables = {"PYTHONPATH": on_path(site), "BACKPLANE_DEVICE": "slow"}
        server = Child(command, folder / "server.log", variables, warm=True)
        self._servers.append(server)
        end = time.monotonic() + START_SECONDS
        while not called(server, "EngineCore"):
            assert server.process.poll() is None and time.monotonic() < end, "no engine was started"
            time.sleep(0.02)
        return server

    def kill(self) -> None:
        for server in self._servers:
            server.kill()


def called(server: Child, name: str) -> list[psutil.Process]:
    """The server's processes whose title holds `name`: VLLM::EngineCore, VLLM::Worker_TP0, …"""
    return [process for process in server.descendants() if name in title(process)]


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a server's helpers come and go
        return ""


def socket_files(server: Server) -> list[Path]:
    """Files through which the server's processes talk to each other."""
    held = [str(connection.laddr) for connection in connections(server, "unix", psutil.Process(server.pid))]
    return [Path(name) for name in sorted(set(held)) if name.startswith("/")]


def connections(server: Child, kind: str, *more: psutil.Process) -> list[Any]:
    """Of the server's descendants, and of processes that are named; a server's helpers come and go."""
    found: list[Any] = []
    for process in (*server.descendants(), *more):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.net_connections(kind)
    return found


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
        self.join(AT_LAST)
        assert not self.is_alive(), "the client was left waiting"
        assert self.end != "complete", "the client was told that all was well"


def ends_after_a_fault(server: Server) -> int:
    """Returns the exit status of a server that a fault is about to strike, once nothing of it is left. How long the
    server takes to come to the fault depends on the machine."""
    status = server.wait(60 + AT_LAST)
    _leaves_nothing(server)
    return status


def ends_by_itself(server: Child) -> int:
    """Returns the exit status of a server that ends in bounded time, once nothing of it is left."""
    status = server.wait(AT_LAST)
    _leaves_nothing(server)
    return status


def _leaves_nothing(server: Child) -> None:
    left = server.wait_for_nothing_left(AT_LAST)
    assert not left, f"left behind: {[(process.pid, title(process)) for process in left]}"
