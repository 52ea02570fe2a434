"""The C++ kernels of the cpu device against the references, for each instruction set, with one and several threads.

Loading the library changes what `ops.X(...)` runs in a process for good, and the instruction set is chosen for a whole
process, so all of this happens in processes of its own (compare_cpu_kernels.py). The operators' own tests
(tests/unit/ops, against float64) are run again there, with the kernels in place of the references.
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

SCRIPT = Path(__file__).with_name("compare_cpu_kernels.py")
ISAS = {"base": 0, "avx2": 1, "avx512": 2}
"""The best of another processor than x86 is the first."""


def run_script(isa: str, *pytest_arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(ISAS[isa]), *pytest_arguments],
        # Without the processor's 16-bit products, so that those of the library are seen. The script asks for more
        # threads where they matter; elsewhere they would only wait for each other.
        env={**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        capture_output=True,
        text=True,
        timeout=800,
    )


def insist_on_processor(isa: str) -> None:
    """Before a process is started that would come to the same."""
    if ISAS[isa] and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"this machine does not have {isa}")


@pytest.fixture(scope="module", params=ISAS)
def report(request: pytest.FixtureRequest) -> Report:
    insist_on_processor(request.param)
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
    """The operators' own tests, against float64; what holds for every operator only for the best instruction set."""
    insist_on_processor(isa)
    run = run_script(isa, "-q", "-x", "-p", "no:cacheprovider", str(OPERATOR_TESTS))
    if run.returncode == NO_SUCH_ISA:
        pytest.skip(f"this machine does not have {isa}")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
