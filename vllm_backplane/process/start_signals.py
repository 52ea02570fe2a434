"""Makes SIGINT and SIGTERM end a server at once while its engine starts.

Until it serves, vLLM's server turns SIGTERM into a KeyboardInterrupt, and asyncio turns Ctrl-C into one when the engine
is ready, minutes later for a large model. A KeyboardInterrupt while vLLM waits for its engine is lost: its
`zmq_socket_ctx` catches it, and the server comes up and stays. The running server installs handlers of its own.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import signal
import threading
from types import FrameType
from typing import Any, NoReturn


class Interrupted(SystemExit):
    """Reports that a signal ended the program before the server was up. Its code is the exit status."""


def interrupt(number: int, _frame: FrameType | None = None) -> NoReturn:
    """Handles a signal: ends the processes that this one has started, and raises `Interrupted`."""
    # vLLM may be interrupted after it has started a process and before it has recorded that process.
    for process in multiprocessing.active_children():
        process.kill()
    raise Interrupted(128 + number)


def end_start_on_signals() -> None:
    """Installs `interrupt` in the place of the handlers that vLLM's server has while it starts, if this is a server."""
    if multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread():
        return
    if not _is_of_server(signal.getsignal(signal.SIGTERM)):
        return
    signal.signal(signal.SIGTERM, interrupt)
    if _is_of_asyncio(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, interrupt)


def _is_of_server(handler: Any) -> bool:
    return getattr(handler, "__qualname__", "") == "run_server.<locals>._interrupt_init"


def _is_of_asyncio(handler: Any) -> bool:
    return handler is signal.default_int_handler or (
        isinstance(handler, functools.partial) and isinstance(getattr(handler.func, "__self__", None), asyncio.Runner)
    )
