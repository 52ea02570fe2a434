"""Terminates an engine or worker process whose server process is gone.

vLLM ends its processes when it shuts down, or when one of their child processes dies. If the main process is killed,
its engine gets no notice: it would keep running, and keep its memory and, if it was forked, the server's port.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from functools import cache
from multiprocessing.util import register_after_fork

import psutil

from vllm_backplane.process.forked_sockets import ENGINE_PROCESS_NAMES

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only

POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and the unconditional exit."""

_watched: list[psutil.Process | None] = []
"""Processes with which this one ends. None stands for a process that had ended before it could be looked up. A forked
process inherits its parent's list, so a worker ends with the server at once and does not wait for the engine to end."""


_watching_pid = 0
"""Process ID for which the watchdog thread was started. A forked process inherits this value, but not the thread."""


@cache
def watch_in_engines() -> None:
    """Starts the watchdog in every engine or worker process forked from this one, and in this one if it is such a
    process. To be called as early as possible: a server may be killed while its engine starts."""
    register_after_fork(watch_in_engines, lambda _: _start_watchdog())
    _start_watchdog()


def _start_watchdog() -> None:
    global _watching_pid
    if _watching_pid == os.getpid() or not multiprocessing.current_process().name.startswith(ENGINE_PROCESS_NAMES):
        return
    _watching_pid = os.getpid()
    threading.Thread(target=_watch, args=(_record_parent(),), name="backplane-orphan-watchdog", daemon=True).start()


def _record_parent() -> bool:
    """Adds the parent process to `_watched`. Returns whether the parent is known: multiprocessing sets it in a
    spawned process only after the modules of its target have been imported."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Not os.getppid(): once the parent has ended, that is the process which adopted this one.
        _watched.append(_older_process(parent.pid))
    return parent is not None


def _older_process(pid: int | None) -> psutil.Process | None:
    """Returns the process with this ID if it started before the current one. A younger process has reused the ID."""
    try:
        found = psutil.Process(pid)
        # Start times are computed from the system's boot time, which Linux reports with an error of up to a second.
        return found if found.create_time() <= psutil.Process().create_time() + 1 else None
    except psutil.NoSuchProcess:
        return None


def _watch(parent_known: bool) -> None:
    while not parent_known:
        time.sleep(POLL_SECONDS)
        parent_known = _record_parent()
    while all(_is_alive(process) for process in _watched):
        time.sleep(POLL_SECONDS)
    logger.error("The process that started this one is gone, so this process terminates.")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _is_alive(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
