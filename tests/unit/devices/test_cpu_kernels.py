"""Tests the C++ kernels of the cpu device against the references, for each instruction set and number of threads.

Loading the library changes the implementation of `ops.X(...)` for the rest of the process, so the tests run in
processes of their own (compare_cpu_kernels.py). The operators' own tests (tests/unit/ops, against float64) run there
again, with the kernels in place of the references: with the best instruction set, or with every one in `make test-all`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compare_cpu_kernels import ISAS, OPERATOR_TESTS, PARTS, Report

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("compare_cpu_kernels.py")


def run_script(*pytest_arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *pytest_arguments],
        # oneDNN must not use the processor's 16-bit instructions, so that the library's GEMM is tested. The script
        # requests more threads for the tests that need them; the others would only be slower.
        env={**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        capture_output=True,
        text=True,
        timeout=800,
    )


@pytest.fixture(scope="module")
def report() -> Report:
    run = run_script()
    assert run.returncode == 0, run.stderr[-4000:]
    found: Report = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_set_was_compared(report: Report, isa: str) -> None:
    if isa not in report["instruction sets"]:
        assert isa != "base"
        pytest.skip(f"this machine does not have {isa}")


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_kernels_agree_with_references(report: Report, part: str) -> None:
    assert report[part] == []


@pytest.mark.parametrize("isas", ["best", pytest.param("every", marks=pytest.mark.exhaustive)])
def test_operator_tests_hold_with_kernels(isas: str) -> None:
    """Runs the operators' own tests, against float64; test_every_operator.py only with the best instruction set."""
    run = run_script(isas, "-q", "-x", "-p", "no:cacheprovider", str(OPERATOR_TESTS))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
