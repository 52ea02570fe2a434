"""Runs a program of a test in a pseudo terminal, types, and waits for what it prints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HANG_SECONDS = 120.0
"""Seconds without the expected output after which the program counts as hanging."""
CTRL_C, CTRL_D = "\x03", "\x04"


class PseudoTerminal:
    """Runs a program in a terminal of its own. As a context manager, it kills the program's session on exit."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x32\x00\xf0\x00\x00\x00\x00\x00")  # 50 lines of 240 characters
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**variables, "TERM": "xterm"},
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        )
        os.close(slave)
        self.text = ""
        """All output so far."""
        self._seen = 0

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *_exception: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        """Sends text as the keyboard does: Enter is a carriage return."""
        os.write(self._master, text.replace("\n", "\r").encode())

    def expect(self, wanted: str) -> str:
        """Waits for a text, and returns the output from the last expected text up to it."""
        end = time.monotonic() + HANG_SECONDS
        while (place := self.text.find(wanted, self._seen)) < 0:
            if time.monotonic() > end or not self._read():
                raise AssertionError(f"{wanted!r} is not in {self.text[self._seen :]!r}, which follows "
                                     f"{self.text[: self._seen]!r}")  # fmt: skip
        found = self.text[self._seen : place]
        self._seen = place + len(wanted)
        return found

    def wait(self) -> int:
        """Waits for the end of the program, and returns its exit status."""
        end = time.monotonic() + HANG_SECONDS
        while self._read():
            if time.monotonic() > end:
                raise AssertionError(f"the program goes on after {self.text!r}")
        return self.process.wait(HANG_SECONDS)

    def _read(self) -> bool:
        """Reads output. Returns whether there may be more."""
        if not select.select([self._master], [], [], 1.0)[0]:
            return True
        try:
            more = os.read(self._master, 1 << 16)
        except OSError:  # no process has the terminal open any more
            return False
        self.text += more.decode(errors="replace").replace("\r\n", "\n")
        return bool(more)
