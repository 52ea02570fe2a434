"""The C++ products of quantized linear layers, with every instruction set that the machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compare_quantized_products import PARTS

HERE = Path(__file__).resolve().parent
SETS = ("portable", "avx2", "avx-vnni", "avx512-vnni", "amx", "neon", "dotprod", "i8mm")

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
