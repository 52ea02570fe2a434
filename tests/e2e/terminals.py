"""Runs `vllm-backplane serve` on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from processes import WARM, environment
from server import COMMAND, START_SECONDS

from tests import warm_start

if TYPE_CHECKING:
    from tests.warm_start import Forked

COLUMNS = 120


class OnTerminal:
    """Runs a server on a terminal of its own. As a context manager, it kills the server's session on exit."""

    def __init__(
        self, folder: Path, *arguments: str, warm: bool = True, variables: Mapping[str, str | None] | None = None
    ) -> None:
        """Starts the server; with `warm`, from a process that has imported vLLM where possible."""
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        os.set_blocking(self._master, False)
        line = [COMMAND, "serve", *arguments]
        given = environment(**(WARM if warm else {}) | dict(variables or {}))
        forked = self._fork(line, folder, given) if warm else None
        self._controls = forked is None
        self.process = forked or subprocess.Popen(
            line,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=given,
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        )
        self._output = b""

    def _fork(self, line: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Forked | None:
        return warm_start.fork(line, Path(os.ttyname(self._slave)), variables, folder=folder, with_vllm=True)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.process.poll() is None:
            left = psutil.Process(self.process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait(30)
        os.close(self._master)
        os.close(self._slave)

    @property
    def text(self) -> str:
        """Returns what the server has written, with ends of lines as in a file."""
        return self._output.decode(errors="replace").replace("\r\n", "\n")

    @property
    def lines(self) -> list[str]:
        """Returns the lines that can be seen, without styles: a line that shows progress is written again and again."""
        return [re.sub(r"^.*\r|\x1b\[\d*m", "", line).rstrip() for line in self.text.split("\n")]

    def press_ctrl_c(self) -> None:
        if self._controls:
            os.write(self._master, b"\x03")
        else:  # a forked server only writes to the terminal
            os.killpg(self.process.pid, signal.SIGINT)

    def expect(self, wanted: str) -> None:
        """Waits until the server has written what a regular expression matches."""
        end = time.monotonic() + START_SECONDS
        while not re.search(wanted, self.text):
            assert self.process.poll() is None or self._read(), f"the server has ended\n{self.text}"
            assert time.monotonic() < end, f"{wanted!r} was not written\n{self.text}"
            self._read()

    def wait(self) -> int:
        """Waits for the end of the server, and returns its status."""
        end = time.monotonic() + START_SECONDS
        while (status := self.process.poll()) is None:
            assert time.monotonic() < end, f"the server has not ended\n{self.text}"
            self._read()
        while self._read(0.0):
            pass
        return status

    def _read(self, seconds: float = 0.1) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        self._output += os.read(self._master, 1 << 16)
        return True
