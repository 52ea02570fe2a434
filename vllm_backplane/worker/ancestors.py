"""Ends a worker whose server is gone.

vLLM ends its processes when they are told to, or when one of their children dies; a main process that is killed tells
nobody. The engine would stay, hold the memory and, if it was forked, the server's port.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
from vllm.logger import init_logger

logger = init_logger("vllm." + __name__)

EVERY_SECONDS = 1.0
GRACE_SECONDS = 5.0


def follow(levels: int) -> None:
    """Watch the parent, and its parent up to `levels`, and end this process when one of them has ended. The engine that
    a worker belongs to then ends as it does whenever a worker dies."""
    watched = psutil.Process().parents()[:levels]
    threading.Thread(target=_watch, args=(watched,), name="backplane-ancestors", daemon=True).start()


def _watch(watched: list[psutil.Process]) -> None:
    while all(_lives(process) for process in watched):
        time.sleep(EVERY_SECONDS)
    logger.error("The process that started this one is gone, so this one ends too.")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
