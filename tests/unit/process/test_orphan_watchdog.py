"""Checks that the processes of an engine end when their server is killed, at any moment of their start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import multiprocessing
import os
import signal
import sys
import time

METHOD = sys.argv[1]
CONTEXT = multiprocessing.get_context(METHOD)


def report(name):
    os.write(1, f"{name} {os.getpid()}\\n".encode())  # one write, so that lines of several processes do not mix


def stay():
    time.sleep(600)


def plugin():
    from vllm_backplane.process import orphan_watchdog

    orphan_watchdog.POLL_SECONDS, orphan_watchdog.GRACE_SECONDS = 0.1, 0.5
    orphan_watchdog.watch_in_engines()


def engine():
    signal.signal(signal.SIGTERM, lambda *_: None)  # vLLM's handler only records it while the engine starts
    server = os.getppid()
    report("engine")
    CONTEXT.Process(target=worker, name="VllmWorker-0").start()
    if METHOD == "spawn":
        while os.getppid() == server:
            time.sleep(0.05)
        plugin()  # after another process, which does not end, has adopted this one
    stay()


def worker():
    report("worker")
    stay()


if METHOD == "spawn" and multiprocessing.current_process().name.startswith("VllmWorker"):
    plugin()  # during the imports of a spawned process, before multiprocessing has set its parent


def another():
    report("another")
    stay()


if __name__ == "__main__":
    if METHOD == "fork":  # otherwise every process loads the plugin itself
        plugin()
    CONTEXT.Process(target=engine, name="EngineCore").start()
    CONTEXT.Process(target=another, name="Process-1").start()
    report("server")
    stay()
"""
"""A server, its engine, the engine's worker, and an unrelated process. Each prints its process ID and keeps running."""


class Family:
    """Runs the program, and holds the processes of it that have printed their ID."""

    def __init__(self, folder: Path, method: str) -> None:
        script = folder / "program.py"
        script.write_text(PROGRAM)
        self.main = subprocess.Popen(
            [sys.executable, str(script), method], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.main.stdout
        self._output = self.main.stdout
        self.members: dict[str, psutil.Process] = {}

    def wait_for(self, *names: str) -> None:
        while not self.members.keys() >= set(names):
            name, pid = self._output.readline().split()
            self.members[name] = psutil.Process(int(pid))

    def kill_the_server(self) -> None:
        self.main.send_signal(signal.SIGKILL)
        self.main.wait()

    def alive(self) -> set[str]:
        return {name for name, process in self.members.items() if lives(process)}

    def alive_in_the_end(self, expected: set[str]) -> set[str]:
        """Returns the processes that are alive, as soon as they are the expected ones or after a minute."""
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
        self._output.close()


def lives(process: psutil.Process) -> bool:
    """Returns whether a process runs. A zombie does not; whether it is reaped depends on the machine's first
    process."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(params=["fork", "spawn"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Family]:
    made = Family(tmp_path, request.param)
    yield made
    made.end()


def test_a_killed_server_ends_its_engine_and_no_other_process(family: Family) -> None:
    """A forked process watches from its start. A spawned one starts to watch when it loads the plugin."""
    family.wait_for("server", "engine", "worker", "another")
    time.sleep(1)
    assert family.alive() == set(family.members), "no process may end before the server"
    family.kill_the_server()
    assert family.alive_in_the_end({"another"}) == {"another"}
