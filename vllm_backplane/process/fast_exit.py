"""Ends a server's process without the teardown of the interpreter, and with the status of the signal that ended it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from vllm_backplane.process import start_events

last_status: int | str | None = None
"""The status with which this process ends, once that is known. Exit handlers cannot find it out in another way."""


def exit_without_teardown(status: int | str | None) -> NoReturn:
    """Runs the exit handlers and ends the process without destroying the interpreter.

    Destroying what vLLM has imported, object by object, takes seconds, for which a user who pressed Ctrl-C would wait.
    `status` is the argument of sys.exit: a text is printed, and the exit status is 1.
    """
    global last_status
    last_status = status or 0
    if isinstance(status, str):
        with contextlib.suppress(OSError):
            print(status, file=sys.stderr)
    atexit._run_exitfuncs()
    flush_output()
    os._exit(1 if isinstance(status, str) else status or 0)


def flush_output() -> None:
    """Writes what is buffered, as far as it can be written: a full disk must not change how a process goes on."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def exit_with_status_of_signals() -> None:
    """Makes this process end with the status of the SIGINT or SIGTERM that stops it (130 or 143), without teardown.

    The installed handlers still run, and decide how the server stops. Does nothing in a child process of a server.
    """
    if multiprocessing.parent_process() is None:
        for number in (signal.SIGINT, signal.SIGTERM):
            installed = signal.getsignal(number)
            if callable(installed):  # otherwise the signal is ignored, or ends the process by itself
                signal.signal(number, functools.partial(_handle, installed))


def _handle(installed: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
    start_events.report_stopping()
    # Exit handlers run in reverse order, so this one comes first, and runs the others.
    atexit.register(_exit, 128 + number)
    installed(number, frame)


def _exit(status: int) -> NoReturn:
    atexit.unregister(_exit)
    exit_without_teardown(status)
