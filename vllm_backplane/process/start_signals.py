"""Makes SIGINT and SIGTERM end a server at once while its engine starts.

Until it serves, vLLM's server raises KeyboardInterrupt on SIGTERM. On Ctrl-C, asyncio raises it only when the event
loop runs again, which is after the engine is ready, minutes later for a large model. A KeyboardInterrupt while vLLM
waits for its engine is lost: its `zmq_socket_ctx` catches it, and the server comes up and stays. The running server
installs handlers of its own.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from vllm_backplane.guards import guarded
from vllm_backplane.process import start_events
from vllm_backplane.process.fast_exit import exit_with_status_of_signals, exit_without_teardown

LAST_SECONDS = 4.0
"""Seconds after a signal within which the process ends by itself. Then it is ended without its exit handlers."""


class Interrupted(SystemExit):
    """Reports that a signal ended the program before the server was up. Its code is the exit status."""


def interrupt(number: int, _frame: FrameType | None = None) -> NoReturn:
    """Handles a signal: ends the processes that this one has started, and raises `Interrupted`.

    Libraries in other languages turn an exception of a signal handler into one of their own, or lose it, and Python
    ignores exceptions in finalizers and in what it calls around a fork. The process therefore ends with the same status
    if another exception arrives at its top, if this one is ignored, and after some seconds in any case.
    Further signals are ignored until then: in the middle of the exit handlers, they would leave files behind.
    """
    for further in (signal.SIGINT, signal.SIGTERM):
        signal.signal(further, signal.SIG_IGN)
    start_events.report_stopping()
    # vLLM may be interrupted after it has started a process and before it has recorded that process.
    for process in multiprocessing.active_children():
        process.kill()
    sys.excepthook = lambda *_fault: exit_without_teardown(128 + number)
    sys.unraisablehook = functools.partial(_end_if_ignored, sys.unraisablehook)
    last = threading.Timer(LAST_SECONDS, os._exit, (128 + number,))
    last.daemon = True
    last.start()
    raise Interrupted(128 + number)


def _end_if_ignored(report: Callable[[Any], object], ignored: Any) -> None:
    if isinstance(ignored.exc_value, Interrupted):
        exit_without_teardown(ignored.exc_value.code)
    report(ignored)


def end_start_on_signals() -> None:
    """Installs `interrupt` in the place of the handlers that vLLM's server has while it starts, if this is a server.

    With several API servers, vLLM's handlers also serve after the start. They are kept, and the process gets the exit
    status of the signal.
    """
    if multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread():
        return
    installed = signal.getsignal(signal.SIGTERM)
    if _is_of_several_servers(installed):
        exit_with_status_of_signals()
    elif _is_of_server(installed):
        signal.signal(signal.SIGTERM, interrupt)
        if _raises_keyboard_interrupt(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, interrupt)


@guarded(
    "vllm.entrypoints.cli.serve:run_multi_api_server",
    why="its signal handler is recognized by name, and given an exit status",
)
def _is_of_several_servers(handler: Any) -> bool:
    return getattr(handler, "__qualname__", "") == "run_multi_api_server.<locals>.signal_handler"


@guarded(
    "vllm.entrypoints.launchers.api_server.entry:run_server",
    why="its signal handler is recognized by name, and replaced",
)
def _is_of_server(handler: Any) -> bool:
    return getattr(handler, "__qualname__", "") == "run_server.<locals>._interrupt_init"


def _raises_keyboard_interrupt(handler: Any) -> bool:
    return handler is signal.default_int_handler or (
        isinstance(handler, functools.partial) and isinstance(getattr(handler.func, "__self__", None), asyncio.Runner)
    )
