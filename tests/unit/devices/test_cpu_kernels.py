"""Tests the C++ kernels of the cpu device against the references, for each instruction set and number of threads.

Loading the library changes the implementation of `ops.X(...)` for the rest of the process, and the instruction set is
chosen per process, so the tests run in processes of their own (compare_cpu_kernels.py). The operators' own tests
(tests/unit/ops, against float64) run there again, with the kernels in place of the references.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from compare_cpu_kernels import NO_SUCH_ISA, OPERATOR_TESTS, PARTS, Report

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("compare_cpu_kernels.py")
ISAS = {"base": 0, "avx2": 1, "avx512": 2}
"""Instruction sets by the library's numbers; processors other than x86 have the first only."""


def run_script(isa: str, *pytest_arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(ISAS[isa]), *pytest_arguments],
        # oneDNN must not use the processor's 16-bit instructions, so that the library's GEMM is tested. The script
        # requests more threads for the tests that need them; the others would only be slower.
        env={**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        capture_output=True,
        text=True,
        timeout=800,
    )


def require_processor(isa: str) -> None:
    """Skips the test here, because the process that it starts would find the same and skip later."""
    if ISAS[isa] and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"this machine does not have {isa}")


@pytest.fixture(scope="module", params=ISAS)
def report(request: pytest.FixtureRequest) -> Report:
    require_processor(request.param)
    run = run_script(request.param)
    assert run.returncode == 0, run.stderr[-4000:]
    found: Report | None = json.loads(run.stdout.splitlines()[-1])
    if found is None:
        pytest.skip(f"this machine does not have {request.param}")
    return found


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_kernels_agree_with_references(report: Report, part: str) -> None:
    assert report[part] == []


@pytest.mark.parametrize("isa", ISAS)
def test_operator_tests_hold_with_kernels(isa: str) -> None:
    """Runs the operators' own tests, against float64; test_every_operator.py only with the best instruction set."""
    require_processor(isa)
    run = run_script(isa, "-q", "-x", "-p", "no:cacheprovider", str(OPERATOR_TESTS))
    if run.returncode == NO_SUCH_ISA:
        pytest.skip(f"this machine does not have {isa}")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
