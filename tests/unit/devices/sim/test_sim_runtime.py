"""Runs the tests of the simulated NPU as a PyTorch device, in processes of their own.

Loading the device gives a process an accelerator for the rest of its life. So this file only starts the processes; the
tests are in `inside/`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

FILES = sorted(path for path in (Path(__file__).parent / "inside").glob("*.py") if path.name != "conftest.py")
ALONE = ("shared_process", "sleep")
"""Files whose tests need a process of their own, because they test its first start or all of its memory."""
RUNS = {
    "together": [path for path in FILES if path.stem not in ALONE],
    **{path.stem: [path] for path in FILES if path.stem in ALONE},
}


@pytest.mark.parametrize("files", RUNS.values(), ids=RUNS.keys())
def test_inside(files: list[Path]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BACKPLANE_")}
    given = ["-q", "-p", "no:cacheprovider", "--timeout=120", *map(str, files)]
    command = [sys.executable, "-m", "pytest", *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
