"""Tests that a process ends with its status whatever becomes of its output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
from vllm_backplane.process.fast_exit import exit_without_teardown
print("a line that cannot be written")
exit_without_teardown({status!r})
"""


@pytest.mark.parametrize(("status", "expected"), [(143, 143), (None, 0), ("the engine died", 1)])
def test_a_full_disk_changes_no_status(status: object, expected: int) -> None:
    command = [sys.executable, "-c", PROGRAM.format(status=status)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=full, env=buffered, timeout=60, check=False)
    assert run.returncode == expected
