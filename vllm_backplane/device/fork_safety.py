"""Makes fork safe for a process that has computed with several threads.

vLLM forks its engine and workers. OpenMP's threads do not survive a fork, but the runtime in the child still counts on
them, so the first parallel operator there waits forever: a script that used PyTorch before it made an `LLM` would
hang.
OpenMP 5 can give its threads back; done right before each fork, parent and child both start anew when they need to.
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
    os.register_at_fork(before=release_threads, after_in_child=forget_wakeup)


def forget_wakeup() -> None:
    """An event loop of the parent is told of signals through a descriptor that the child inherits: a signal to the
    engine would be handled by the server as well, which takes it for its own."""
    signal.set_wakeup_fd(-1)


def release_threads() -> None:
    for path in _openmp_libraries():
        pause = getattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW), "omp_pause_resource_all", None)
        if pause is not None:  # runtimes before OpenMP 5 have no such call
            pause(_HARD)


def _openmp_libraries() -> list[str]:
    """The OpenMP runtimes in this process, by path."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux, where processes are not forked
        return []
    return sorted(set(re.findall(r"(/\S*/lib(?:g|i|)omp5?[^/\s]*\.so[^/\s]*)$", maps, flags=re.MULTILINE)))
