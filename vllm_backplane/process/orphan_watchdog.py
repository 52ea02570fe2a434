"""Ends an engine or worker whose server is gone.

vLLM ends its processes when they are told to, or when one of their children dies; a main process that is killed tells
nobody. The engine would stay, hold the memory and, if it was forked, the server's port.
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

from vllm_backplane.process.forked_sockets import OF_ENGINES

logger = logging.getLogger("vllm." + __name__)  # of vLLM's tree, which it configures

EVERY_SECONDS = 1.0
GRACE_SECONDS = 5.0

_line: list[psutil.Process | None] = []
"""Whom this process ends with; None is one that had ended before it was looked at. A forked process has its parent's
line, so a worker ends with the server too, without waiting for the engine to end."""


_follower = 0
"""The process that watches; a forked one begins anew."""


@cache
def follow_in_engines() -> None:
    """From now on, processes of engines that are forked from this one watch whom they belong to; so does this one if it
    is one of them. That is as early as can be: a server may be killed while its engine starts."""
    register_after_fork(follow_in_engines, lambda _: _follow())
    _follow()


def _follow() -> None:
    global _follower
    if _follower == os.getpid() or not multiprocessing.current_process().name.startswith(OF_ENGINES):
        return
    _follower = os.getpid()
    threading.Thread(target=_watch, args=(_learn(),), name="backplane-ancestors", daemon=True).start()


def _learn() -> bool:
    """Whether it is known who started this process. One that was spawned is told after it has imported what it runs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # By the number that the parent wrote down: the system names another as soon as that one has ended.
        _line.append(_older(parent.pid))
    return parent is not None


def _older(pid: int | None) -> psutil.Process | None:
    """The process with that number, if it began before this one: otherwise the number has passed to another."""
    try:
        found = psutil.Process(pid)
        # Both count from the system's start, of which the system's own account wavers by a second.
        return found if found.create_time() <= psutil.Process().create_time() + 1 else None
    except psutil.NoSuchProcess:
        return None


def _watch(learnt: bool) -> None:
    while not learnt:
        time.sleep(EVERY_SECONDS)
        learnt = _learn()
    while all(_lives(process) for process in _line):
        time.sleep(EVERY_SECONDS)
    logger.error("The process that started this one is gone, so this one ends too.")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _lives(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
