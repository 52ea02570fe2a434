"""Tests that a signal during the start ends the process with its status, also if code that runs loses the exception or
more signals follow."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import atexit, os, signal, sys, time
from vllm_backplane.process import start_signals
start_signals.LAST_SECONDS = 1.0
signal.signal(signal.SIGTERM, start_signals.interrupt)
atexit.register(print, "handled")
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
except BaseException as fault:
    {handling}
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("handling", "output"),
    [("raise", "handled\n"), ("raise ValueError('a schema cannot be built') from None", "handled\n"), ("pass", "")],
    ids=["passed on", "turned into another exception", "lost"],
)
def test_the_status_is_that_of_the_signal(handling: str, output: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(handling=handling)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 128 + signal.SIGTERM, run.stderr
    assert run.stdout == output, "exit handlers remove temporary files"
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("further", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_stop_the_exit_handlers(further: signal.Signals) -> None:
    program = f"import atexit, os\natexit.register(lambda: (os.kill(os.getpid(), {int(further)}), print('whole')))\n"
    program += PROGRAM.format(handling="raise")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, run.stderr
    assert run.stdout == "handled\nwhole\n"
    assert "Traceback" not in run.stderr


def test_an_exception_that_python_ignores_ends_the_process() -> None:
    """Tests a signal in a finalizer. Exceptions are ignored there, as in functions that Python calls around a fork."""
    program = """
import atexit, os, signal, time
from vllm_backplane.process import start_signals
start_signals.LAST_SECONDS = 60.0
signal.signal(signal.SIGTERM, start_signals.interrupt)
atexit.register(print, "handled")
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
Finalized()
print("goes on")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert run.returncode == 128 + signal.SIGTERM, run.stderr
    assert (run.stdout, run.stderr) == ("handled\n", "")
