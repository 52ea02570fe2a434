"""A forked engine does not keep the server's port.

The server binds its port before it starts the engine, and a fork inherits the socket: the port would stay taken for as
long as the engine takes to end, and vLLM, which looks for another holder of its port when it stops, would find one.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
from functools import cache
from multiprocessing.util import register_after_fork

OF_ENGINES = ("EngineCore", "VllmWorker")
"""How vLLM names the processes that serve nobody; the others of a program are its own business."""


@cache
def release_in_engines() -> None:
    register_after_fork(release_in_engines, lambda _: _release())


def _release() -> None:
    if not multiprocessing.current_process().name.startswith(OF_ENGINES):
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _bound():
        # Replaced rather than closed: the object that owns the descriptor will close whatever has its number.
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _bound() -> list[int]:
    """Descriptors of TCP sockets that wait for connections or are about to."""
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_bound(fd)]


def _is_bound(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
    except OSError:  # the descriptor that read the folder, closed by now
        return False
    held = socket.socket(fileno=descriptor)
    try:
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
            return False
        if held.getsockname()[1] == 0:
            return False
        held.getpeername()
        return False
    except OSError:  # no peer
        return True
    finally:
        held.detach()
