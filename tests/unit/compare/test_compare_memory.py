"""The watch over memory sees what a child holds, and that it let go of it; the watch over time sees that it worked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.compare import machine, memory

HELD = 200 * 2**20
PROGRAM = f"""
import subprocess, sys
child = "import time; held = b'x' * {HELD}; time.sleep(2)"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


def test_the_peak_is_of_the_whole_tree() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM])
    peak = memory.watch(process, 60)
    assert process.returncode == 0
    assert HELD < peak < 2 * HELD
    assert memory.tree_pss(process.pid) == 0


def test_a_process_that_does_not_end_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            memory.watch(process, 0.3)
    finally:
        process.kill()
        process.wait()


def test_the_work_of_a_child_counts_as_ours_once_it_has_ended() -> None:
    work = "import time\nwhile time.process_time() < 1: pass\nprint(flush=True)\nimport sys; sys.stdin.read()"
    bystanders = machine.Bystanders()
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        # The machine was busy for a second that is not known as ours yet.
        assert machine._busy_seconds() - bystanders.busy > 0.9
        assert machine._own_seconds() - bystanders.own < 0.5
        assert bystanders.share() > 0
    assert machine._own_seconds() - bystanders.own > 0.9
