"""Processes of an engine end when their server is killed, at whatever moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import multiprocessing
import os
import signal
import sys
import time

METHOD = sys.argv[1]
CONTEXT = multiprocessing.get_context(METHOD)


def tell(name):
    os.write(1, f"{name} {os.getpid()}\\n".encode())  # in one piece


def stay():
    time.sleep(600)


def plugin():
    from vllm_backplane.process import orphan_watchdog as ancestors

    ancestors.EVERY_SECONDS, ancestors.GRACE_SECONDS = 0.1, 0.5
    ancestors.follow_in_engines()


def engine():
    signal.signal(signal.SIGTERM, lambda *_: None)  # vLLM's only takes a note of it while the engine is made
    server = os.getppid()
    tell("engine")
    CONTEXT.Process(target=worker, name="VllmWorker-0").start()
    if METHOD == "spawn":
        while os.getppid() == server:
            time.sleep(0.05)
        plugin()  # after the system has named another parent, who will not end
    stay()


def worker():
    tell("worker")
    stay()


if METHOD == "spawn" and multiprocessing.current_process().name.startswith("VllmWorker"):
    plugin()  # while what the process is to run is imported, before it is told of its parent


def another():
    tell("another")
    stay()


if __name__ == "__main__":
    if METHOD == "fork":  # else every process loads the plugin by itself
        plugin()
    CONTEXT.Process(target=engine, name="EngineCore").start()
    CONTEXT.Process(target=another, name="Process-1").start()
    tell("server")
    stay()
"""
"""A server, its engine, the engine's worker, and a process of some other use. Each tells its number and stays."""


class Family:
    """The program, and which processes have told of themselves."""

    def __init__(self, folder: Path, method: str) -> None:
        script = folder / "program.py"
        script.write_text(PROGRAM)
        self.main = subprocess.Popen(
            [sys.executable, str(script), method], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.main.stdout
        self._told = self.main.stdout
        self.members: dict[str, psutil.Process] = {}

    def wait_for(self, *names: str) -> None:
        while not self.members.keys() >= set(names):
            name, pid = self._told.readline().split()
            self.members[name] = psutil.Process(int(pid))

    def kill_the_server(self) -> None:
        self.main.send_signal(signal.SIGKILL)
        self.main.wait()

    def alive(self) -> set[str]:
        return {name for name, process in self.members.items() if lives(process)}

    def alive_in_the_end(self, expected: set[str]) -> set[str]:
        """Waits for what is expected, but not for ever."""
        end = time.monotonic() + 60
        while self.alive() != expected and time.monotonic() < end:
            time.sleep(0.05)
        return self.alive()

    def end(self) -> None:
        for process in self.members.values():
            if lives(process):
                process.kill()
        self.main.kill()
        self.main.wait()
        self._told.close()


def lives(process: psutil.Process) -> bool:
    """A zombie does not: who reaps it depends on the machine's first process."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(params=["fork", "spawn"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Family]:
    made = Family(tmp_path, request.param)
    yield made
    made.end()


def test_a_killed_server_takes_its_engine_along_and_nobody_else(family: Family) -> None:
    """Forked processes watch from their first moment. A spawned one begins to when it loads the plugin."""
    family.wait_for("server", "engine", "worker", "another")
    time.sleep(1)
    assert family.alive() == set(family.members), "nobody had to go yet"
    family.kill_the_server()
    assert family.alive_in_the_end({"another"}) == {"another"}
