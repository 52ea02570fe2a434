"""Makes fork safe for a process that has computed with several threads or runs an event loop.

vLLM forks its engine and workers. OpenMP's threads do not survive a fork, but the OpenMP runtime in the child still
expects them, so the first parallel operator there waits forever: a script that used PyTorch before it created an `LLM`
would hang. OpenMP 5 can release its threads. If that happens right before each fork, parent and child both start new
threads when they need them.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
from functools import cache
from pathlib import Path

_HARD = 2  # omp_pause_hard: threads end, settings may be lost


@cache
def install() -> None:
    """Registers the fork handlers, once per process."""
    os.register_at_fork(before=release_threads, after_in_child=reset_wakeup_fd)


def reset_wakeup_fd() -> None:
    """Detaches the child from the signal file descriptor of the parent's event loop.

    The child inherits the descriptor. Without this, a signal to the engine would also reach the event loop of the
    server, which would handle it as its own.
    """
    signal.set_wakeup_fd(-1)


def release_threads() -> None:
    """Ends the threads of every OpenMP runtime in this process; the next parallel region starts new ones."""
    for path in _openmp_libraries():
        pause = getattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW), "omp_pause_resource_all", None)
        if pause is not None:  # runtimes before OpenMP 5 have no such call
            pause(_HARD)


def _openmp_libraries() -> list[str]:
    """Returns the paths of the OpenMP runtimes that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux, where processes are not forked
        return []
    return sorted(set(re.findall(r"(/\S*/lib(?:g|i|)omp5?[^/\s]*\.so[^/\s]*)$", maps, flags=re.MULTILINE)))
