"""The products of blocks as they lie, which benchmarks/gguf_layouts.py holds against ours, give the same results."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gguf_layouts
from vllm_backplane.devices.cpu import native

PROGRAM = Path(gguf_layouts.__file__)


@pytest.mark.skipif(platform.machine() != "aarch64", reason="the products are written for ARM")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the program builds them")
def test_both_forms_of_every_type_give_the_same_results() -> None:
    """Or the program fails. Five rows: four at a time, and one that is left."""
    if native.fault() is not None or "dotprod" not in native.available_dot_kernels():
        pytest.skip("both need dot-product instructions, and ours its library")
    options = ["--shapes", "20x512", "--rows", "1", "5", "--rounds", "1", "--seconds", "0.001", "--json"]
    ended = subprocess.run([sys.executable, str(PROGRAM), *options], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    lines = json.loads(ended.stdout)["results"]
    assert {(line["type"], line["rows"]) for line in lines} == {
        (kind.name, rows) for kind in gguf_layouts.TYPES for rows in (1, 5)
    }


def test_elsewhere_it_says_what_it_is_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "argv", [str(PROGRAM)])
    with pytest.raises(SystemExit, match="written for ARM; this machine is x86_64"):
        gguf_layouts.main()
