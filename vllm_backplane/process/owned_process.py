"""Starts a process whose life ends with that of the process that started it, and reads the reason of its failure.

The process leads its own session, so that a Ctrl-C in the terminal reaches its owner only. Its output goes to a log in
a folder that only this user can open. The folder is removed at the end, except the log of a process that failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_backplane.errors import BackplaneError, UsageError
from vllm_backplane.private_folder import private_folder
from vllm_backplane.safe_text import one_line

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SECONDS = 20.0
"""Seconds after which a process that has been asked to end is killed."""
PROGRESS = "vllm-backplane: "
ERROR = f"{PROGRESS}error: "
LOG_TAIL = 1 << 18
"""Bytes at the end of a log in which the reason of a failure is looked for."""
MAX_REASON = 1000
"""Characters of a reason that are shown."""
USAGE = 2
"""Exit status after a mistake of the user."""
_RAISED = re.compile(r"\b(\w+(?:Error|Unavailable|Fault|Exception): .*)")
_ELSEWHERE = "Engine core initialization failed"
"""Text of an error whose cause was logged before it, by another process."""
_PR_SET_PDEATHSIG = 1


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs a module whose program calls `end_with_owner`."""
    # -P keeps the current folder off the import path.
    return [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments]


def end_with_owner(owner: int) -> None:
    """Lets the system send SIGTERM to this process when its parent, the process `owner`, is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != owner:  # it ended before the system was asked
        raise SystemExit(128 + signal.SIGTERM)


class OwnedProcess:
    """Runs a process with a folder and a log. It ends with this object's context, or with this process."""

    def __init__(self, name: str) -> None:
        """Creates the folder. `start` starts the process."""
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=private_folder()))
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._keep_log = False
        self._passed_on = 0

    def __enter__(self) -> OwnedProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def start(self, given: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the process with a command that `command` returned."""
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                given,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def status(self, seconds: float = 0.0) -> int | None:
        """Waits at most `seconds` for the end of the process. Returns its exit status, or None while it runs."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def pass_on(self, progress: Callable[[str], None]) -> None:
        """Passes on the progress messages that the process has logged since the last call."""
        with self.log.open("rb") as log:
            log.seek(self._passed_on)
            while (line := log.readline()).endswith(b"\n"):
                self._passed_on = log.tell()
                text = line.decode(errors="replace")
                if text.startswith(PROGRESS) and not text.startswith(ERROR):
                    progress(one_line(text.removeprefix(PROGRESS)))

    def failure(self, status: int, what: str) -> BackplaneError:
        """Returns an error with the reason why the process has ended: `what`, the reason, and the path of the log,
        which then stays. A mistake of the user is stated as the process states it."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LOG_TAIL))
            lines = log.read().decode(errors="replace").splitlines()
        stated = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        if status == USAGE and stated:
            return UsageError(one_line(stated[-1], MAX_REASON))
        self._keep_log = True
        raised = [match[1] for line in lines if (match := _RAISED.search(line)) and _ELSEWHERE not in line]
        ended = f"it ended with status {status}" if status >= 0 else f"signal {-status} ended it"
        reason = one_line((stated or raised or [ended])[-1], MAX_REASON)
        return BackplaneError(f"{what}: {reason}; its log is {self.log}")

    def stop(self) -> None:
        """Ends the process and all of its session, and removes the folder, except the log of a process that failed."""
        before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
        try:
            if self.process is not None:
                self._end(self.process)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for path in self.folder.iterdir():
            if path != self.log:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not self._keep_log:
            shutil.rmtree(self.folder)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # those that outlive it, in its session
        process.wait()
