"""Releases the server's listening socket in forked engine and worker processes.

The server binds its port before it starts the engine, and a forked process inherits the socket. The port would stay in
use until the engine has ended, and vLLM, which checks at shutdown whether another process holds its port, would find
the engine.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
from functools import cache
from multiprocessing.util import register_after_fork

from vllm_backplane.guards import guarded

ENGINE_PROCESS_NAMES = ("EngineCore", "VllmWorker")
"""Prefixes of vLLM's names for engine and worker processes. Other processes of the program are left alone."""


@cache
@guarded(
    "vllm.v1.engine.utils:CoreEngineProcManager.__init__",
    "vllm.v1.executor.multiproc_executor:WorkerProc.make_worker_process",
    why="engine and worker processes are recognized by their names",
)
def release_sockets_in_engines() -> None:
    """Makes engine and worker processes that are forked from this one release its listening sockets."""
    register_after_fork(release_sockets_in_engines, lambda _: _release())


def _release() -> None:
    if not multiprocessing.current_process().name.startswith(ENGINE_PROCESS_NAMES):
        return
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in _bound_sockets():
        # Replaced rather than closed: the socket object would later close another file that has reused the number.
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _bound_sockets() -> list[int]:
    """Returns the descriptors of TCP sockets that are bound to a port and not connected."""
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_bound_socket(fd)]


def _is_bound_socket(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
    except OSError:  # listdir's own descriptor, which is closed by now
        return False
    held = socket.socket(fileno=descriptor)
    try:
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
            return False
        if held.getsockname()[1] == 0:
            return False
        held.getpeername()
        return False
    except OSError:  # getpeername: not connected
        return True
    finally:
        held.detach()
