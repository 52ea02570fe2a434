"""Begins a start: forks the display and redirects the output of the server to its log, where the output is a terminal.

The server keeps its process ID, and the shell gets its status. The display ends when the server has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from vllm_backplane import __version__
from vllm_backplane.errors import BackplaneError
from vllm_backplane.process import fast_exit, start_events
from vllm_backplane.start_display.display import Display
from vllm_backplane.start_display.left_out import install_filters
from vllm_backplane.start_display.log_folder import REMEDY, LogTail, open_log, pipe_of
from vllm_backplane.start_display.terminal import Terminal

STARTING_SECONDS, SERVING_SECONDS = 0.25, 1.0
"""Seconds between two looks at the log."""
LAST_SECONDS = 3.0
"""Seconds for which the server, at its end, waits for the display."""


@dataclass(slots=True)
class _Session:
    """Holds what the server must know of its display."""

    display: int
    """Process ID."""
    writer: int
    """Descriptor of the named pipe. The display reads its end when the server has ended, however that happened."""
    terminal: tuple[int, int]
    """Copies of the descriptors of standard output and standard error."""
    pipe: Path


_session: _Session | None = None


def begin(*, verbose: bool, custom_logging: bool) -> None:
    """Begins the start of a server in this process, before vLLM is imported.

    With `verbose`, all output stays where it is, and so it does where no log file can be written. With
    `custom_logging`, the user has configured vLLM's loggers, and no line is left out.
    """
    began = time.monotonic()
    # The output of the first process of a container is its log ("docker logs").
    if not verbose and os.isatty(1) and os.isatty(2) and os.getpid() != 1:
        try:
            _begin_display(began)
        except (BackplaneError, OSError) as fault:
            print(f"vllm-backplane: the log is shown here and not kept in a file: {fault}", file=sys.stderr)
    if _session is None:
        start_events.announce(start_events.Start(began, filters=not (verbose or custom_logging)))
        install_filters()
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # until the server installs its own handlers
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_at_once)


def _end_at_once(number: int, _frame: FrameType | None) -> NoReturn:
    """Ends this process. While libraries are imported, an exception would be lost, or printed with its traceback."""
    start_events.report(start_events.STOPPING)
    fast_exit.last_status = 128 + number
    _finish()
    os._exit(128 + number)


def _begin_display(began: float) -> None:
    global _session
    log, output = open_log()
    pipe = pipe_of(log)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, output)
        undo.callback(log.unlink, missing_ok=True)
        undo.callback(pipe.unlink, missing_ok=True)
        try:
            os.mkfifo(pipe, 0o600)
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, reader)
            writer = os.open(pipe, os.O_WRONLY | os.O_CLOEXEC)
            undo.callback(os.close, writer)
        except OSError as fault:
            raise BackplaneError(f"cannot create {pipe}: {fault.strerror}; {REMEDY}") from fault
        fast_exit.flush_output()
        display = os.fork()
        undo.pop_all()
    if display == 0:
        os.close(writer)
        os.close(output)
        _display_and_exit(reader, log, began)
    os.close(reader)
    copies = (os.dup(1), os.dup(2))
    for place in (1, 2):
        os.dup2(output, place)
    os.close(output)
    _session = _Session(display, writer, copies, pipe)
    # A process that is forked from the server must not keep the display waiting for its end.
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_finish)  # runs last, after everything that the server registers
    start_events.announce(start_events.Start(began, str(pipe)))


def _forget() -> None:
    global _session
    if _session is not None:
        os.close(_session.writer)
        for copy in _session.terminal:
            os.close(copy)
        _session = None


def check_mode(args: Any) -> None:
    """Ends the display if the parsed arguments of `vllm serve` select a mode in which nothing reports that the server
    is ready: one without vLLM's HTTP server in Python."""
    modes = {
        "--headless": getattr(args, "headless", False),
        "--grpc": getattr(args, "grpc", False),
        "--data-parallel-multi-port-external-lb": getattr(args, "data_parallel_multi_port_external_lb", False),
        "VLLM_USE_RUST_FRONTEND": os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
    }
    for name, is_selected in modes.items():
        if is_selected:
            give_terminal_back(f"With {name}, the log of vLLM is shown:")


def give_terminal_back(reason: str) -> None:
    """Ends the display, and writes the output of this process to the terminal again."""
    session = _session
    if session is None:
        return
    start_events.report(start_events.RELEASE, reason=reason)
    fast_exit.flush_output()
    _wait_for_display()
    for place, copy in zip((1, 2), session.terminal, strict=True):
        os.dup2(copy, place)
        os.close(copy)
    start = start_events.announced()
    if start is not None:
        start_events.announce(start_events.Start(start.began))


def _finish() -> None:
    """Lets the display show how the server ended, and waits for it, so that it writes nothing after the prompt."""
    if _session is not None:
        status = fast_exit.last_status
        is_text = isinstance(status, str)
        start_events.report(start_events.END, status=1 if is_text else status, reason=str(status) if is_text else None)
        _wait_for_display()


def _wait_for_display() -> None:
    global _session
    session, _session = _session, None
    if session is None:
        return
    os.close(session.writer)
    end = time.monotonic() + LAST_SECONDS
    try:
        while os.waitpid(session.display, os.WNOHANG)[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
    except ChildProcessError:
        pass  # another part of the server has waited for it
    session.pipe.unlink(missing_ok=True)


def _display_and_exit(reader: int, log: Path, began: float) -> NoReturn:
    """Runs the display in its process, until the server has ended."""
    try:
        _run_display(reader, log, began)
    except BaseException as fault:
        _report_failure(log, fault)
    finally:
        os._exit(0)


def _report_failure(log: Path, fault: BaseException) -> None:
    with contextlib.suppress(OSError), log.open("a") as output:
        traceback.print_exception(fault, file=output)
    _write(f"\r\nThe display has failed. The server goes on; its log is {log}\r\n")


def _run_display(reader: int, log: Path, began: float) -> None:
    terminal = Terminal(_write, _columns, in_foreground=_in_foreground)
    display = Display(terminal, str(log), began)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the server too, which reports them
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # "stty tostop" would stop the server for a line of the display
    tail = LogTail(log)
    events = _Events(reader)
    display.begin(f"vllm-backplane {__version__}")
    while not events.ended and not display.released:
        select.select([reader], [], [], SERVING_SECONDS if display.is_ready else STARTING_SECONDS)
        found = events.read()
        display.log(tail.read())
        for event in found:
            display.step(event)
        display.tick()
    display.log(tail.read())
    display.end()


class _Events:
    """Reads events from the named pipe."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._rest = b""
        self.ended = False
        """Whether the server has ended, or is about to."""

    def read(self) -> Sequence[Mapping[str, object]]:
        try:
            part = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return ()
        self.ended = not part
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in lines]


def _write(text: str) -> None:
    left = text.encode(errors="replace")
    with contextlib.suppress(OSError):  # if the terminal was closed, the display still bounds the log
        while left:
            left = left[os.write(1, left) :]


def _columns() -> int:
    try:
        return os.get_terminal_size(1).columns
    except OSError:
        return 0


def _in_foreground() -> bool:
    """Returns whether the server has the terminal, and not a shell that has it in the background."""
    try:
        return os.tcgetpgrp(1) == os.getpgrp()
    except OSError:  # the terminal controls no processes
        return True
