"""Runs Python programs of the tests in separate interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests import warm_start
from tests.environment import AT_START

_BEFORE = "import gc; gc.disable()\n"
_AFTER = "\nimport os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)\n"


def command(program: str, *arguments: str) -> list[str]:
    """Returns the command that runs `program` without garbage collection and without interpreter shutdown.

    Most programs import vLLM, which takes ten seconds of a core. A third of that is the garbage collector, which finds
    nothing during imports, and the shutdown of the interpreter.
    """
    return [sys.executable, "-c", _BEFORE + program + _AFTER, *arguments]


def on_path(*folders: Path) -> str:
    """Returns a value for PYTHONPATH with `folders` before its current folders.

    It does not contain the whole sys.path of this process, to which libraries have added folders of their own:
    warm_start.py forks no program whose PYTHONPATH has such folders.
    """
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(
    given: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs a program and returns its result, like subprocess.run with captured output.

    The program is offline, all its processes are killed at its end, and most libraries that vLLM imports are imported
    already where the environment allows it (warm_start.py).
    """
    sys.audit("subprocess.Popen", given[0], given, cwd, None)  # warm_start.py forks without an event
    variables = {**(AT_START if env is None else env), **warm_start.OFFLINE}
    where = cwd or Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with output.open("wb") as to_output, errors.open("wb") as to_errors:
            child = warm_start.fork(given, output, variables, errors=errors, folder=where) or subprocess.Popen(
                given,
                env=variables,
                cwd=where,
                stdin=subprocess.DEVNULL,
                stdout=to_output,
                stderr=to_errors,
                start_new_session=True,
            )
        try:
            status = child.wait(timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(given, status, output.read_text(), errors.read_text())
