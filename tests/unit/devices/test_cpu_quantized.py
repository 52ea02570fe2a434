"""Tests the C++ kernels of quantized linear layers with every instruction set of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compare_quantized_products import PARTS

pytestmark = pytest.mark.process

HERE = Path(__file__).resolve().parent
SETS = ("portable", "avx2", "avx-vnni", "avx512-vnni", "amx", "neon", "dotprod", "i8mm")

Report = dict[str, list[str]]


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """Returns the differences by dot-product kernel; one process uses one kernel after another."""
    run = subprocess.run(
        [sys.executable, str(HERE / "compare_quantized_products.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Report] = json.loads(run.stdout.splitlines()[-1])
    assert found.keys() <= set(SETS) and "portable" in found
    return found


@pytest.fixture(params=SETS)
def report(request: pytest.FixtureRequest, reports: dict[str, Report]) -> Report:
    if request.param not in reports:
        pytest.skip(f"this machine does not have {request.param}")
    return reports[request.param]


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_products_agree_with_integers_and_float64(report: Report, part: str) -> None:
    assert report[part] == []
