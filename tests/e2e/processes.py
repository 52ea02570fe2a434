"""Starts child processes for the tests, each in its own session and with a log, and kills them after the test.

vLLM's processes start further processes. Those that remain after their parents have ended are found in two ways: by
descent, from a list that was taken while the parents lived, and by session, which a process keeps when its parent ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.warm_start import Forked

SCRIPTS = Path(sys.executable).parent
TAIL_LINES = 80
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
SIM: dict[str, str] = {"BACKPLANE_DEVICE": "sim", "BACKPLANE_SIM_FALLBACK": "forbid", "BACKPLANE_SIM_MEMORY": "2GiB"}
"""Variables of children on the simulated device, for tests that need no others."""

logs: list[tuple[str, Path]] = []
"""Command and log of every started child, for the report of a failure."""


def environment(**changes: str | None) -> dict[str, str]:
    """Returns the environment of a child: that of the tests, offline, without usage reports, with `changes`.

    The value None removes a variable.
    """
    from tests.environment import AT_START  # imported here, because child processes use this module too

    result = {**AT_START, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def on_path(folder: Path) -> str:
    """Returns a value for PYTHONPATH with `folder` before its current folders."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


WARM: dict[str, str | None] = {
    START_METHOD: "fork",  # a spawned process would import all of vLLM again
    "BACKPLANE_DEVICE": "cpu",
    "VLLM_SERVER_DEV_MODE": "1",  # for requests that call workers, forget prefixes or sleep
    "PYTHONPATH": on_path(Path(__file__).parent),  # for worker_rpc.py
}
"""Variables of warm children. Children with the same variables share a process that has imported vLLM."""


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Returns the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


class Child:
    """Runs a command in its own session. As a context manager, it kills the whole session on exit."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        variables: Mapping[str, str | None] | None = None,
        *,
        warm: bool = False,
        with_vllm: bool = False,
    ) -> None:
        """Starts the command; with `warm`, forks it with imported libraries where possible (tests/warm_start.py).

        With `with_vllm` too, vLLM may be one of them. `warm` also sets the variables in `WARM`, unless `variables` has
        other values.
        """
        self.command = list(command)
        self.log = log
        self._seen: dict[int, psutil.Process] = {}
        logs.append((" ".join(self.command), log))
        given = environment(**(WARM if warm else {}) | dict(variables or {}))
        with log.open("wb") as output:
            self.process = (warm and _fork(self.command, log, given, with_vllm)) or subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=given,
                cwd=log.parent,  # not the repository, whose folders Python would import from
                start_new_session=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """Returns the log."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Waits for the end of the child and returns its exit status; fails with its log if that takes too long."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s: {self.command}\n{tail(self.log)}") from None

    def descendants(self) -> list[psutil.Process]:
        """Returns the current descendants, and records them, so that `left_over` finds them as orphans."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._seen.update({process.pid: process for process in found})
        return found

    def left_over(self) -> list[psutil.Process]:
        """Returns all processes of this child that are alive: itself, recorded descendants, members of its session."""
        candidates = {process.pid: process for process in _session(self.pid)} | self._seen
        return [process for process in candidates.values() if _lives(process)]

    def wait_for_nothing_left(self, seconds: float) -> list[psutil.Process]:
        """Waits at most `seconds` until no process is left, and returns those that are left."""
        end = time.monotonic() + seconds
        while (left := self.left_over()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the main process only."""
        os.kill(self.pid, number)

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to the process group, as a terminal does for Ctrl-C."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kills all processes of this child."""
        self.descendants()
        # A process may start another one while it is being killed, so this repeats until none is left.
        while left := self.left_over():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if self.process.poll() is None:
                self.process.wait(30)
            psutil.wait_procs(left, timeout=30)


def _fork(command: list[str], log: Path, variables: dict[str, str], with_vllm: bool) -> Forked | None:
    from tests import warm_start  # imported here, because child processes use this module and cannot import `tests`

    return warm_start.fork(command, log, variables, with_vllm=with_vllm)


def commands_in_session(leader: int, *, but: int) -> list[str]:
    """Returns the command lines of the processes that are alive in a session, except one process."""
    found = []
    for process in _session(leader):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != but and _lives(process):
                found.append(" ".join(process.cmdline()))
    return found


def _session(leader: int) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                yield process
        except (ProcessLookupError, PermissionError):
            continue


def _lives(process: psutil.Process) -> bool:
    """Returns whether a process is alive.

    A zombie is not: it has no resources, and the machine's first process decides when it disappears.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
