"""The C++ products of quantized linear layers, with every instruction set that the machine has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compare_quantized_products import PARTS

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "csrc" / "cpu"
SETS = ("portable", "avx2", "avx-vnni", "avx512-vnni", "amx", "neon", "dotprod")

Report = dict[str, list[str]]


@pytest.fixture(scope="module", params=SETS)
def report(request: pytest.FixtureRequest) -> Report:
    run = subprocess.run(
        [sys.executable, str(HERE / "compare_quantized_products.py"), request.param],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: Report | None = json.loads(run.stdout.splitlines()[-1])
    if found is None:
        pytest.skip(f"this machine does not have {request.param}")
    return found


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_products_agree_with_integers_and_float64(report: Report, part: str) -> None:
    assert report[part] == []


def test_products_stay_within_their_memory(tmp_path: Path) -> None:
    """The same products without PyTorch, under the sanitizers for addresses and undefined behaviour."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "install a C++ compiler, or name one by CXX"
    check = tmp_path / "check"
    sources = [str(file) for file in sorted(SOURCES.glob("dot_*.cpp")) if file.name != "dot_kernels.cpp"]
    options = [
        "-std=c++20",
        "-O1",
        "-Wno-psabi",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover",
        f"-I{SOURCES}",
    ]
    command = [compiler, *options, str(HERE / "dot_products_check.cpp"), *sources, "-o", str(check)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert built.returncode == 0, built.stderr[-4000:]
    run = subprocess.run([str(check)], capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert "portable: " in run.stdout and "products as expected" in run.stdout
