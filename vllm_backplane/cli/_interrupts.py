"""Lets Ctrl-C end the command silently while Python imports modules. An exception there would print a traceback.

`cli/__init__.py` imports this module first. It changes nothing in a program that imports the command as a library.
"""

from __future__ import annotations

import os
import signal
import sys

COMMAND = "vllm-backplane"


def end_silently() -> None:
    """Makes the system end this process on Ctrl-C, as it does with SIGTERM, if Python would raise KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_exceptions() -> bool:
    """Undoes `end_silently`, for code that has to clean up, and returns whether there was anything to undo."""
    were_silent = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if were_silent:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return were_silent


if sys.argv and os.path.basename(sys.argv[0]) == COMMAND:
    end_silently()
