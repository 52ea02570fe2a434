"""Programs that tests run in an interpreter of their own."""

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

_BEFORE = "import gc; gc.disable()\n"
_AFTER = "\nimport os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)\n"


def command(program: str, *arguments: str) -> list[str]:
    """Runs `program`. Most import vLLM, ten seconds of a core, of which a third is the collector, looking for garbage
    that imports do not leave, and the interpreter's end: both are left out."""
    return [sys.executable, "-c", _BEFORE + program + _AFTER, *arguments]


def on_path(*folders: Path) -> str:
    """A value for PYTHONPATH that finds `folders` before what is there already. All of this process's sys.path would
    not do: libraries have put folders of their own into it, with which no program could be forked (warm_start.py)."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(
    given: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run does with output that is captured, but that nothing is fetched, nothing is left of the program,
    and most of what vLLM imports is there already if the environment allows it (warm_start.py)."""
    variables = {**(os.environ if env is None else env), **warm_start.OFFLINE}
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
