"""Keeps signals from being lost while Python waits for a line from the terminal.

Python runs the handler of a signal between two of its instructions. A signal that arrives just before `input` waits, or
in another thread, interrupts no wait, and its handler would run after the next key. Another signal, which does nothing
itself, therefore interrupts the wait a moment later.
"""

from __future__ import annotations

import os
import signal
import threading
import time

NOTHING = signal.SIGURG
"""A signal that the system ignores by default, and that no part of the chat uses."""
AFTER_SECONDS = (0.1, 0.9)
"""Pauses before each interruption. The second one is for a machine that is so busy that the first comes too early."""


def interrupt_waits() -> None:
    """Interrupts the main thread a moment after each signal that has a handler in Python."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(NOTHING, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_interrupt, args=(reader,), name="interrupts of waits", daemon=True).start()


def _interrupt(reader: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while received := os.read(reader, 1):
        if received[0] == NOTHING:
            continue
        for seconds in AFTER_SECONDS:
            time.sleep(seconds)
            signal.pthread_kill(main, NOTHING)
