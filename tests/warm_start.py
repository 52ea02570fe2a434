"""Starts Python programs of the tests faster: forks them from a process that has imported PyTorch and other libraries.

Importing vLLM takes nine seconds, and seven of these are spent on PyTorch, transformers and other libraries. Without
this module, every engine and server of the tests would spend them. The forked child imports only vLLM and Backplane,
and reads their environment variables itself.

Engines and servers are forked from a process that has imported vLLM and Backplane too, under their variables
(`with_vllm`). Those that have the same variables share this process.

`fork` returns None where a forked child could behave differently from a started one, and the caller then starts it in
the usual way. This is the case if the child's environment differs in a variable that an imported library may have
read, or if its PYTHONPATH has a module or an entry point that an imported library would have used. Tests of the start
itself do not use this module.
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
from typing import IO, Any

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
"""The libraries that are imported before the fork: those that take vLLM longest to import."""

IMPORTED_BY_CHILD = {"vllm": "VLLM_", "vllm_backplane": "BACKPLANE_", "numba": "NUMBA_"}
"""Packages that each child imports after the fork, with the prefix of the environment variables that only they read."""

VLLM_MODULES = (
    "vllm.v1.worker.gpu_worker",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm_backplane.worker.worker",
    "vllm_backplane.runner.v1",
    "vllm_backplane.settings.compat",
)
"""What is imported for engines and servers."""

MOST_WITH_VLLM = 4
"""Number of processes that keep vLLM imported, each for other variables. Each takes memory."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""A variable that vLLM sets itself when it is imported, which is too late here: PyTorch is imported before."""
MAY_DIFFER = (*IMPORTED_BY_CHILD.values(), "PYTEST_", *ONE_THREAD)
"""Prefixes of the variables that may differ between children, because no module in MODULES reads them."""
PYTHONPATH = "PYTHONPATH"
"""This variable may differ too, if no module in MODULES would have found anything in its folders (`_path`)."""
STARTUP_MODULES = ("sitecustomize", "usercustomize")
"""Modules that an interpreter imports when it starts."""


class Forked:
    """Represents a forked child with those methods of subprocess.Popen that the tests use."""

    def __init__(self, command: Sequence[str], pid: int, forker: _Forker) -> None:
        self.args, self.pid, self._forker = command, pid, forker
        self.returncode: int | None = None
        self._polling = threading.Lock()

    def poll(self) -> int | None:
        with self._polling:  # the status of a process can be read once
            if self.returncode is None:
                self.returncode = self._forker.request({"poll": self.pid})
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
    with_vllm: bool = False,
) -> Forked | None:
    """Runs a Python program in a forked process with its own session; returns None if the environment forbids a fork.

    The program runs in `folder`, or in the folder of its log. The log and the file for `errors` must exist; without
    `errors`, standard error goes to the log. With `with_vllm`, the program may find vLLM imported already.
    """
    if os.environ.get("OMP_NUM_THREADS") != "1":
        return None  # numpy would start its threads at import, and a fork does not have them
    forker = _forker()
    if not forker.allows(variables):
        return None
    if with_vllm:
        forker = forker.with_vllm(variables) or forker
    pid = forker.request(
        {
            "program": list(command[1:] if command[0] == sys.executable else command),
            "outputs": [str(log), str(errors or log)],
            "folder": str(folder or log.parent),
            "variables": dict(variables),
        }
    )
    return None if pid is None else forker.adopt(Forked(command, pid, forker))


class _Forker:
    """Sends requests to a process from which programs are forked. The process ends with this one."""

    def __init__(self, control: socket.socket, log: IO[str], process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket, self._log, self._process = control, log, process
        self._control = control.makefile("rw")
        self._one_at_a_time = threading.RLock()
        self._variables = _variables()
        self._with_vllm: dict[frozenset[tuple[str, str]], _Forker] = {}
        self._children: list[Forked] = []

    @classmethod
    def start(cls) -> _Forker:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # for as long as this process
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=_variables(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()
        return cls(ours, log, process)

    def with_vllm(self, variables: Mapping[str, str]) -> _Forker | None:
        """Returns a process that has imported vLLM under these variables, or None if they forbid a fork."""
        key = frozenset((name, value) for name, value in variables.items() if not name.startswith("PYTEST_"))
        with self._one_at_a_time:  # no other request may come between this one and its socket
            found = self._with_vllm.pop(key, None)
            if found is None:
                if not self.request({"with_vllm": dict(variables)}):
                    return None
                ours, theirs = socket.socketpair()
                socket.send_fds(self._socket, [b"\n"], [theirs.fileno()])
                theirs.close()
                found = _Forker(ours, self._log)
            self._with_vllm[key] = found  # the last one was used last
            idle = [other for other, forker in self._with_vllm.items() if forker is not found and forker.is_idle()]
            for other in idle[: max(0, len(self._with_vllm) - MOST_WITH_VLLM)]:
                self._with_vllm.pop(other).close()
            return found

    def adopt(self, child: Forked) -> Forked:
        """Records a child of the process."""
        self._children.append(child)
        return child

    def is_idle(self) -> bool:
        """Returns whether all children have ended."""
        self._children = [child for child in self._children if child.poll() is None]
        return not self._children

    def close(self) -> None:
        """Ends the process, which must be idle."""
        self._control.close()
        self._socket.close()

    def allows(self, variables: Mapping[str, str]) -> bool:
        """Returns whether a child with these variables may be forked."""
        either = {*self._variables, *variables}
        differ = [name for name in either if self._variables.get(name) != variables.get(name)]
        return all(name == PYTHONPATH or name.startswith(MAY_DIFFER) for name in differ)

    def request(self, body: Mapping[str, Any]) -> Any:
        """Sends a request to the process and returns its response; raises if the process has ended."""
        with self._one_at_a_time:
            try:
                self._control.write(json.dumps(body) + "\n")
                self._control.flush()
                response = self._control.readline()
            except OSError:
                response = ""
        if not response:
            self._log.seek(0)
            status = self._process.wait(60) if self._process else "unknown"
            raise RuntimeError(f"{__file__} ended with status {status}:\n{self._log.read()[-4000:]}")
        return json.loads(response)


def _variables() -> dict[str, str]:
    """Returns the environment variables of the process from which programs are forked."""
    from tests.environment import AT_START  # imported here, because that process cannot import `tests`

    return {**AT_START, **OFFLINE, **ONE_THREAD}


_starting = threading.Lock()


def _forker() -> _Forker:
    with _starting:  # otherwise two threads could start one process each
        return _only_forker()


@cache
def _only_forker() -> _Forker:
    return _Forker.start()


def _folders(variables: Mapping[str, str]) -> list[str]:
    """Returns the folders of PYTHONPATH in `variables`."""
    return variables[PYTHONPATH].split(os.pathsep) if variables.get(PYTHONPATH) else []


def _path(variables: Mapping[str, str], path: list[str]) -> list[str] | None:
    """Returns the child's sys.path without the folder of its program, or None if the child must not be forked.

    It must not be forked if its PYTHONPATH could replace a module that is imported already, or has an entry point of a
    package that is imported already.
    """
    ours, theirs = _folders(os.environ), _folders(variables)
    if not set(ours) <= set(theirs) or not all(map(os.path.isabs, theirs)):
        return None
    for place in (Path(folder) for folder in theirs if folder not in path):
        for found in place.iterdir() if place.is_dir() else ():
            name = re.split(r"[-.]", found.name)[0]
            if name in STARTUP_MODULES or name in sys.modules:
                return None
            points = found / "entry_points.txt"
            groups = re.findall(r"^\[(.*)\]", points.read_text(), re.MULTILINE) if points.is_file() else []
            if not all(group.startswith(tuple(IMPORTED_BY_CHILD)) for group in groups):
                return None
    return list(dict.fromkeys([*theirs, *path]))


def _run_program(
    program: list[str],
    outputs: list[str],
    folder: str,
    variables: dict[str, str],
    path: list[str],
    set_by_imports: dict[str, str],
) -> None:
    """Runs a program as the main program of this process, which has just been forked and leads its session."""
    os.chdir(folder)
    for place, name in enumerate(outputs, 1):
        output = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, place)
        os.close(output)
    os.environ.clear()
    os.environ.update({**variables, **set_by_imports})
    # Python reseeds its generator after a fork; numpy and PyTorch would draw the same numbers in all children.
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
    """Forks like os.fork, and returns in the parent only when the child leads its own session.

    A search for the processes of that session therefore finds the child at once.
    """
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in started children (tests/e2e/processes.py)
    del sys.path[0]  # this file's folder
    path = list(sys.path)
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    # setproctitle locates the memory of the process title here, while the environment is at its original address.
    importlib.import_module("setproctitle").getproctitle()
    early = sorted(IMPORTED_BY_CHILD.keys() & sys.modules.keys())
    assert not early, f"{early} must be imported after the fork, because each child has its own variables for them"
    _serve(control, path, {}, fixed_path=False)


def _serve(control: socket.socket, path: list[str], set_by_imports: dict[str, str], *, fixed_path: bool) -> None:
    """Forks a child for each request, until the other end of the socket is closed.

    The path of a child depends on its variables, unless it is fixed.
    """
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork copies the locks of all, and only one of the threads"
    requests = control.makefile("rw")
    while line := requests.readline():
        request = json.loads(line)
        response: int | None
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            response = os.waitstatus_to_exitcode(status) if pid else None
        elif "with_vllm" in request:
            found = _path(request["with_vllm"], path)
            requests.write(json.dumps(found is not None) + "\n")
            requests.flush()
            if found is not None:
                _, [descriptor], _, _ = socket.recv_fds(control, 1, 1)
                if _fork() == 0:
                    requests.close()
                    control.close()
                    _serve_with_vllm(socket.socket(fileno=descriptor), request["with_vllm"], found)
                    return
                os.close(descriptor)
            continue
        elif (found := path if fixed_path else _path(request["variables"], path)) is None:
            response = None
        else:
            response = _fork()
            if response == 0:
                requests.close()
                control.close()
                _run_program(**request, path=found, set_by_imports=set_by_imports)  # and ends as the program does
                return
        requests.write(json.dumps(response) + "\n")
        requests.flush()


def _serve_with_vllm(control: socket.socket, variables: dict[str, str], path: list[str]) -> None:
    """Imports vLLM and Backplane under these variables, and serves requests of programs that have the same ones."""
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = path
    importlib.invalidate_caches()
    for name in VLLM_MODULES:
        importlib.import_module(name)
    set_by_imports = {name: value for name, value in os.environ.items() if variables.get(name) != value}
    _serve(control, path, set_by_imports, fixed_path=True)


if __name__ == "__main__":
    _main()
