"""Tests that a signal ends a program that waits for a line from its terminal, whichever thread the signal reaches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.environment import AT_START
from tests.pseudo_terminal import PseudoTerminal

PROGRAM = """
import readline, signal, sys, threading, time
from vllm_backplane.chat.signals import interrupt_waits

def signal_to_other_thread():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
interrupt_waits()
threading.Thread(target=signal_to_other_thread, daemon=True).start()
input("waits> ")
"""


@pytest.mark.process
def test_a_signal_that_interrupts_no_wait_is_handled(tmp_path: Path) -> None:
    with PseudoTerminal([sys.executable, "-c", PROGRAM], AT_START, tmp_path) as program:
        program.expect("waits> ")
        assert program.wait() == 143
