"""Processes of an engine end when their server is killed, at whatever moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

PROGRAM = '''
"""A server (the program), its engine and its worker: each prints its name and number, and stays."""

import multiprocessing
import os
import signal
import sys
import time

from vllm_backplane.worker import ancestors

ancestors.EVERY_SECONDS, ancestors.GRACE_SECONDS = 0.1, 0.5
METHOD, MOMENT, NAME = sys.argv[1:]
CONTEXT = multiprocessing.get_context(METHOD)


def stay(name):
    print(name, os.getpid(), flush=True)
    time.sleep(600)


def plugin():
    """vLLM loads it in a server, and in every process that is not forked from one that has."""
    if METHOD == "spawn" or multiprocessing.parent_process() is None:
        ancestors.follow_in_engines()


def engine():
    signal.signal(signal.SIGTERM, lambda *_: None)  # vLLM's takes a note of it while the engine is made, and goes on
    if MOMENT == "before the plugin is loaded":
        server = os.getppid()
        print("engine", os.getpid(), flush=True)
        while os.getppid() == server:
            time.sleep(0.05)
        plugin()
        stay("orphan")
    plugin()
    CONTEXT.Process(target=worker, name="VllmWorker-0").start()
    stay("engine")


def worker():
    plugin()
    stay("worker")


if __name__ == "__main__":
    plugin()
    CONTEXT.Process(target=engine, name=NAME).start()
    stay("server")
'''


class Family:
    """The program, and which processes have told of themselves."""

    def __init__(self, folder: Path, method: str, moment: str, name: str = "EngineCore") -> None:
        script = folder / "program.py"
        script.write_text(PROGRAM)
        self.main = subprocess.Popen(
            [sys.executable, str(script), method, moment, name], stdout=subprocess.PIPE, text=True, bufsize=1
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

    def left(self, seconds: float) -> list[str]:
        """Who lives after at most so many seconds."""
        end = time.monotonic() + seconds
        while (left := [name for name in sorted(self.members) if lives(self.members[name])]) and time.monotonic() < end:
            time.sleep(0.05)
        return left

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


@pytest.fixture
def families() -> Iterator[list[Family]]:
    made: list[Family] = []
    yield made
    for family in made:
        family.end()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_server_takes_engine_and_worker_along(method: str, tmp_path: Path, families: list[Family]) -> None:
    family = Family(tmp_path, method, "any")
    families.append(family)
    family.wait_for("server", "engine", "worker")
    assert family.left(1) == ["engine", "server", "worker"], "nobody is gone yet"
    family.kill_the_server()
    assert family.left(30) == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_server_that_was_killed_before_anyone_looked_is_missed(
    method: str, tmp_path: Path, families: list[Family]
) -> None:
    """The system names another parent by then, which will not end."""
    family = Family(tmp_path, method, "before the plugin is loaded")
    families.append(family)
    family.wait_for("server", "engine")
    family.kill_the_server()
    assert family.left(30) == []


def test_processes_that_are_not_of_engines_are_their_own_masters(tmp_path: Path, families: list[Family]) -> None:
    family = Family(tmp_path, "fork", "any", "Process-1")
    families.append(family)
    family.wait_for("server", "engine", "worker")
    family.kill_the_server()
    assert family.left(2) == ["engine", "worker"]
    os.kill(family.members["engine"].pid, signal.SIGKILL)
    assert family.left(30) == [], "a worker belongs to an engine, whatever that is called"
