"""The simulated NPU as a PyTorch device.

Loading it gives the whole process an accelerator, for good. So the tests in `inside/` run in processes of their own,
and this file only starts them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(path for path in (Path(__file__).parent / "inside").glob("*.py") if path.name != "conftest.py")
ALONE = ("shared_process", "sleep")
"""They are about a process: what was started in it at first, and all of its memory."""
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
