"""Tests the table of operator implementations: resolution, forced references and freezing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_backplane import ops
from vllm_backplane.errors import OperatorError
from vllm_backplane.ops import resolution
from vllm_backplane.ops.operator import Sample, declared, operator, operator_named


def _line(table: tuple[resolution.Resolution, ...], name: str) -> resolution.Resolution:
    return next(line for line in table if line.operator == name)


def test_without_kernels_everything_is_a_reference_with_a_reason() -> None:
    table = resolution.resolve("XLA", "provider")
    assert {line.operator for line in table} == set(declared())
    assert {line.implementation for line in table} == {"reference"}
    assert _line(table, "rms_norm").reason == "no kernel for dispatch key XLA"
    assert _line(table, "rms_norm").provider == "vllm_backplane.ops.norms"


def test_an_unknown_operator_suggests_the_nearest() -> None:
    with pytest.raises(OperatorError, match="did you mean 'rms_norm'"):
        operator_named("rms_nrm")
    with pytest.raises(OperatorError, match="did you mean 'linear'"):
        resolution.resolve("XLA", "provider", ["linaer"])


def test_an_operator_without_a_docstring_or_declared_twice_is_refused() -> None:
    def undocumented(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(OperatorError, match="no docstring"):
        operator("(Tensor x) -> Tensor", samples=lambda space: iter([Sample("one", ())]))(undocumented)
    with pytest.raises(OperatorError, match="declared twice"):
        operator("(Tensor x) -> Tensor", samples=ops.relu2.samples)(ops.relu2.reference)


IN_A_PROCESS = """
import torch
from vllm_backplane import ops
from vllm_backplane.errors import OperatorError
from vllm_backplane.ops import resolution

@resolution.kernel("relu2", "CPU")
def mine(x):
    return x * 0 + 7

line = next(l for l in resolution.resolve("CPU", "library") if l.operator == "relu2")
assert (line.implementation, line.provider) == ("kernel", "__main__.mine"), line
assert ops.relu2(torch.ones(1)).item() == 7
assert next(l for l in resolution.resolve("CUDA", "library") if l.operator == "relu2").implementation == "reference"
try:
    resolution.kernel("relu2", "CPU")(mine)
    raise SystemExit("a second kernel was accepted")
except OperatorError as error:
    assert "already has a kernel" in str(error)

table = resolution.resolve("CPU", "library", ["relu2"])
line = next(l for l in table if l.operator == "relu2")
assert (line.implementation, line.reason) == ("reference", "forced by option reference_ops"), line
assert ops.relu2(torch.full((1,), 3.0)).item() == 9

resolution.freeze(table, "CPU")
resolution.require_unchanged()
assert resolution.frozen() is table
resolution.require_same_references(["relu2"])
for requested in ([], ["relu2", "linear"], ["all"]):
    try:
        resolution.require_same_references(requested)
        raise SystemExit(f"an engine that requests {requested} was accepted")
    except OperatorError as error:
        assert "the references of relu2" in str(error) and "another process" in str(error), error
try:
    resolution.kernel("quick_gelu", "CPU")(mine)
    raise SystemExit("a kernel was accepted after freezing")
except OperatorError as error:
    assert "after start-up" in str(error)
resolution._kernels.impl("quick_gelu", mine, "CPU")  # as a C++ library would, without `kernel`
try:
    resolution.require_unchanged()
    raise SystemExit("a change was not noticed")
except OperatorError as error:
    assert "quick_gelu" in str(error)
"""


@pytest.mark.process
def test_kernels_are_found_forced_back_and_frozen() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_A_PROCESS], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
