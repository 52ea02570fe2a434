"""Matrix products in GGUF's block layout (benchmarks/gguf_layouts.py) give the same results as repacked weights."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gguf_layouts
from tests import compiled
from vllm_backplane.devices.cpu import native

PROGRAM = Path(gguf_layouts.__file__)


@pytest.mark.process
@pytest.mark.compiler
@pytest.mark.skipif(platform.machine() != "aarch64", reason="gguf_layouts.cpp is written for ARM")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the program builds gguf_layouts.cpp with g++")
def test_both_forms_of_every_type_give_the_same_results() -> None:
    """The program fails if results differ. Five rows are a group of four rows and a remainder."""
    if native.fault() is not None or "dotprod" not in native.available_dot_kernels():
        pytest.skip("needs dot-product instructions and the CPU kernel library")
    library = compiled.build("gguf_layouts.so", [*gguf_layouts.FLAGS, gguf_layouts.SOURCE], [gguf_layouts.SOURCE])
    options = [
        "--library",
        str(library),
        "--shapes",
        "20x512",
        "--rows",
        "1",
        "5",
        "--rounds",
        "1",
        "--seconds",
        "0.001",
        "--json",
    ]
    ended = subprocess.run([sys.executable, str(PROGRAM), *options], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    lines = json.loads(ended.stdout)["results"]
    assert {(line["type"], line["rows"]) for line in lines} == {
        (kind.name, rows) for kind in gguf_layouts.TYPES for rows in (1, 5)
    }


def test_elsewhere_it_names_what_it_is_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "argv", [str(PROGRAM)])
    with pytest.raises(SystemExit, match="written for ARM, and this machine is x86_64"):
        gguf_layouts.main()
