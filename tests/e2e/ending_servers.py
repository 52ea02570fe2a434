"""Starts small servers that a test ends in some way, keeps a request in flight, and waits until no process is left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from processes import Child, on_path
from server import COMMAND, START_SECONDS, Server

from tests.ports import free_port

HANG_SECONDS = 60.0
"""Seconds after which a server counts as hanging. vLLM's own timeouts are minutes, and a shorter limit would fail on a
slow machine."""

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
"""Source of a device that takes ten minutes to load its kernels."""
TWO_WORKERS = ("--tensor-parallel-size", "2")


class Starter:
    """Starts small servers, each with a folder of its own; `kill` ends all of them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._base = model, folder
        self._servers: list[Child] = []

    def _folder(self) -> Path:
        """Creates and returns the folder for the next server."""
        made = self._base / str(len(self._servers))
        made.mkdir()
        return made

    def __call__(self, *arguments: str, variables: Mapping[str, str | None] | None = None, warm: bool = True) -> Server:
        """Starts a server with additional arguments and variables, and returns it when it is ready."""
        given = (str(self._model), "--served-model-name", "tiny", *SMALL, *arguments)
        server = Server(self._folder(), *given, variables=variables, warm=warm)
        self._servers.append(server)
        return server

    def starting(self, command: str = COMMAND, port: int | None = None) -> Child:
        """Starts a server, and returns it at once."""
        line = [command, "serve", str(self._model), "--served-model-name", "tiny"]
        line += ["--port", str(port or free_port()), *SMALL]
        server = Child(line, self._folder() / "server.log", warm=True, with_vllm=True)
        self._servers.append(server)
        return server

    def slow(self) -> Child:
        """Starts a server on the slow device, and returns it as soon as its engine process exists."""
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
        while not processes_titled(server, "EngineCore"):
            assert server.process.poll() is None and time.monotonic() < end, "the engine process must have started"
            time.sleep(0.02)
        return server

    def kill(self) -> None:
        for server in self._servers:
            server.kill()


def processes_titled(server: Child, name: str) -> list[psutil.Process]:
    """Returns the server's processes whose title contains `name`: VLLM::EngineCore, VLLM::Worker_TP0, …"""
    return [process for process in server.descendants() if name in title(process)]


def title(process: psutil.Process) -> str:
    """Returns the title of a process, or an empty text if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a helper process of the server has ended
        return ""


def socket_files(server: Server) -> list[Path]:
    """Returns the Unix sockets in the file system through which the server's processes communicate."""
    held = [str(connection.laddr) for connection in connections(server, "unix", psutil.Process(server.pid))]
    return [Path(name) for name in sorted(set(held)) if name.startswith("/")]


def connections(server: Child, kind: str, *more: psutil.Process) -> list[Any]:
    """Returns the network connections of the server's descendants and of the processes in `more`.

    Processes that have ended meanwhile are skipped, because helper processes of a server start and end at any time.
    """
    found: list[Any] = []
    for process in (*server.descendants(), *more):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.net_connections(kind)
    return found


class Request(threading.Thread):
    """Keeps a long streaming request in flight. Its outcome is in `end`: "complete", or the exception that ended it."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._client = server.client()
        self.end: object = None
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(120), "the request must have produced a token within two minutes"

    def run(self) -> None:
        try:
            stream = self._client.completions.create(
                model="tiny", prompt="a", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
            )
            for _chunk in stream:
                self.begun.set()
            self.end = "complete"
        except Exception as fault:  # a broken connection raises one of several exceptions, and each is a valid end
            self.end = fault

    def must_have_failed(self) -> None:
        """Waits for the end of the request, which must be an exception."""
        self.join(HANG_SECONDS)
        assert not self.is_alive(), "the client must not hang"
        assert self.end != "complete", "the client must get an error"


class Stream(threading.Thread):
    """Keeps a streaming request in flight at a server that may not be ready yet, until `stop` is called."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._address = f"http://127.0.0.1:{port}/v1/completions"
        self._stopped = threading.Event()
        self.tokens = 0
        self.start()

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=HANG_SECONDS, trust_env=False) as client:
            while not self._stopped.wait(0.1):
                with contextlib.suppress(httpx.TransportError):  # the server does not listen yet, or ends
                    self._read(client.stream("POST", self._address, json=body))

    def _read(self, response: contextlib.AbstractContextManager[httpx.Response]) -> None:
        with response as lines:
            for _line in lines.iter_lines():
                self.tokens += 1
                if self._stopped.is_set():
                    return

    def stop(self) -> None:
        self._stopped.set()
        self.join(2 * HANG_SECONDS)
        assert not self.is_alive(), "the client must not hang"


def wait_for_exit_after_fault(server: Server) -> int:
    """Waits until a server with an injected fault has ended and left no process, and returns its exit status.

    The limit is longer, because the time until the fault occurs depends on the machine.
    """
    status = server.wait(60 + HANG_SECONDS)
    _require_nothing_left(server)
    return status


def wait_for_exit(server: Child) -> int:
    """Waits until a server has ended and left no process, and returns its exit status."""
    status = server.wait(HANG_SECONDS)
    _require_nothing_left(server)
    return status


def _require_nothing_left(server: Child) -> None:
    left = server.wait_for_nothing_left(HANG_SECONDS)
    assert not left, f"processes are left: {[(process.pid, title(process)) for process in left]}"
