"""Tests that a child forked after parallel work computes; if OpenMP kept its threads, the child would hang."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import os, sys, torch
torch.set_num_threads(2)
a = torch.randn(1500, 1500)
expected = (a @ a).sum() + torch.nn.functional.silu(a).sum()
from vllm_backplane.host import fork_safety
from vllm_backplane.host.fork_safety import _openmp_libraries
assert len(_openmp_libraries()) >= 1, "no OpenMP runtime found in this process"
fork_safety.install()
fork_safety.install()
child = os.fork()
again = (a @ a).sum() + torch.nn.functional.silu(a).sum()
same = torch.equal(expected, again)
if child == 0:
    os._exit(0 if same else 3)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert same
"""


def test_parent_and_child_both_compute_after_a_fork() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
