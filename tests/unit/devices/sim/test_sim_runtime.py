"""The simulated NPU as a PyTorch device.

Loading it gives the whole process an accelerator, for good. So the tests in `inside/` run in processes of their own,
one per file, and this file only starts them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(path for path in (Path(__file__).parent / "inside").glob("*.py") if path.name != "conftest.py")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_inside(file: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BACKPLANE_")}
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-x", "-p", "no:cacheprovider", "--timeout=120"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
