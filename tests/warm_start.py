"""Children that need not import again what vLLM imports of others: a process that has done so is forked for each.

Of nine seconds that importing vLLM takes, seven are for PyTorch, transformers and the like, before every engine and
server of the tests. What is vLLM's and ours each child imports by itself, in an environment of its own. A child whose
environment differs in anything that what was imported may have read is started plainly, and so is one whose PYTHONPATH
has something that would have been imported, or asked for entry points. So is everything that is about starting: tests
ask for it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = (
    "torch",
    "torch._inductor",
    "torch._inductor.lowering",
    "transformers",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "openai.types.responses",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "aiohttp",
    "fastapi",
    "xgrammar",
)
"""What takes longest of all that vLLM imports, itself or when it looks for a platform."""

NOT_YET = {"vllm": "VLLM_", "vllm_backplane": "BACKPLANE_", "numba": "NUMBA_"}
"""What a child imports by itself, and with what the names of the variables begin that it alone reads."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""vLLM says so, too late for what is imported before it."""
MAY_DIFFER = (*NOT_YET.values(), "PYTEST_", *ONE_THREAD)
"""Beginnings of the variables that a child may have of its own: no module above reads them."""
FOLDERS = "PYTHONPATH"
"""May differ, too, if no module above would have found anything there."""
AT_THE_START = ("sitecustomize", "usercustomize")
"""Modules that an interpreter imports by itself."""


class Forked:
    """A child, with what the tests need of subprocess.Popen."""

    def __init__(self, command: Sequence[str], pid: int) -> None:
        self.args, self.pid = command, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _forker().ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return status


def fork(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str],
    *,
    errors: Path | None = None,
    folder: Path | None = None,
) -> Forked | None:
    """Runs a program of Python in a session of its own, in a folder, that of its log if none is named. The files that
    its output goes to are there; if none is named for errors, they go to the log as well. None where its environment
    does not allow it."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        return None  # numpy's matrices have threads from the import on, and a fork would have none of them
    forker = _forker()
    if not forker.fits(variables):
        return None
    pid = forker.ask(
        {
            "program": list(command[1:] if command[0] == sys.executable else command),
            "outputs": [str(log), str(errors or log)],
            "folder": str(folder or log.parent),
            "variables": dict(variables),
        }
    )
    return None if pid is None else Forked(command, pid)


class _Forker:
    """The process that is forked, as others see it. It ends with the process that started it."""

    def __init__(self) -> None:
        self._variables = {**os.environ, **OFFLINE, **ONE_THREAD}
        self._one_at_a_time = threading.Lock()
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # for as long as this process
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=self._variables,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()
        self._control = ours.makefile("rw")

    def fits(self, variables: Mapping[str, str]) -> bool:
        either = {*self._variables, *variables}
        differ = [name for name in either if self._variables.get(name) != variables.get(name)]
        return all(name == FOLDERS or name.startswith(MAY_DIFFER) for name in differ)

    def ask(self, what: Mapping[str, Any]) -> Any:
        with self._one_at_a_time:
            try:
                self._control.write(json.dumps(what) + "\n")
                self._control.flush()
                answer = self._control.readline()
            except OSError:
                answer = ""
        if not answer:
            self._log.seek(0)
            raise RuntimeError(f"{__file__} ended with status {self._process.wait(60)}:\n{self._log.read()[-4000:]}")
        return json.loads(answer)


_starting = threading.Lock()


def _forker() -> _Forker:
    with _starting:  # or two threads that come first would have one each
        return _only_forker()


@cache
def _only_forker() -> _Forker:
    return _Forker()


def _folders(variables: Mapping[str, str]) -> list[str]:
    """Of PYTHONPATH."""
    return variables[FOLDERS].split(os.pathsep) if variables.get(FOLDERS) else []


def _path(variables: Mapping[str, str], path: list[str]) -> list[str] | None:
    """Where a child looks for modules, but for the folder of its program. None where something that is imported already
    might be another one in its PYTHONPATH, or would have asked there for entry points."""
    ours, theirs = _folders(os.environ), _folders(variables)
    if not set(ours) <= set(theirs) or not all(map(os.path.isabs, theirs)):
        return None
    for place in (Path(folder) for folder in theirs if folder not in path):
        for found in place.iterdir() if place.is_dir() else ():
            name = re.split(r"[-.]", found.name)[0]
            if name in AT_THE_START or name in sys.modules:
                return None
            points = found / "entry_points.txt"
            groups = re.findall(r"^\[(.*)\]", points.read_text(), re.MULTILINE) if points.is_file() else []
            if not all(group.startswith(tuple(NOT_YET)) for group in groups):
                return None
    return list(dict.fromkeys([*theirs, *path]))


def _become(program: list[str], outputs: list[str], folder: str, variables: dict[str, str], path: list[str]) -> None:
    """In a process that was just forked and leads its session: runs the program as its own."""
    os.chdir(folder)
    for place, name in enumerate(outputs, 1):
        output = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, place)
        os.close(output)
    os.environ.clear()
    os.environ.update(variables)
    # Python's own chance is another one in every process; these would be the same in all that are forked.
    importlib.import_module("numpy").random.seed()
    importlib.import_module("torch").default_generator.seed()
    importlib.invalidate_caches()
    gc.enable()
    if program[0] == "-c":
        _, source, *arguments = program
        sys.path[:] = ["", *path]
        sys.argv = ["-c", *arguments]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(source, "<string>", "exec"), vars(main))
    else:
        sys.path[:] = [str(Path(program[0]).parent), *path]
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _fork() -> int:
    """As os.fork. The child leads a session of its own when the parent goes on: whoever looks for it finds it there."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(reading)
    else:
        os.close(writing)
        os.read(reading, 1)  # until the other end is closed
        os.close(reading)
        return pid
    os.close(writing)
    return 0


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in children that are started (tests/e2e/processes.py)
    del sys.path[0]  # this file's folder
    path = list(sys.path)
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    # Looks for the place of the title while the environment is where the system put it.
    importlib.import_module("setproctitle").getproctitle()
    gc.freeze()
    early = sorted(NOT_YET.keys() & sys.modules.keys())
    assert not early, f"{early} were imported before their variables are known"
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: what is forked would have one of them, and the locks of all"
    requests = control.makefile("rw")
    while line := requests.readline():
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (found := _path(asked["variables"], path)) is None:
            answer = None
        else:
            answer = _fork()
            if answer == 0:
                requests.close()
                control.close()
                _become(**asked, path=found)  # and ends as the program does
                return
        requests.write(json.dumps(answer) + "\n")
        requests.flush()


if __name__ == "__main__":
    _main()
