"""Tests the C++ GEMM for 16-bit weights against float64, with and without the processor's 16-bit instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import json, sys, itertools, torch
import vllm_backplane.ops as ops
from vllm_backplane.devices.cpu import native
assert native.fault() is None, native.fault()
if sys.argv[1] != "DEFAULT":
    assert native.wants_blocks(torch.bfloat16), "without BF16 instructions the weights should come in blocks"
generator = torch.Generator().manual_seed(0)
results = []
for dtype, rows, inner, outer, bias in json.load(sys.stdin):
    kind = getattr(torch, dtype)
    x = torch.randn(rows, inner, generator=generator).to(kind)
    weight = torch.randn(outer, inner, generator=generator).to(kind)
    offset = torch.randn(outer, generator=generator).to(kind) if bias else None
    products = [ops.linear(x, weight, offset), ops.blocked_linear(x, native.to_blocks(weight), outer, offset)]
    exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
    scale = (x.double().abs() @ weight.double().abs().T).clamp_min(1e-30)
    for got in products:
        error = ((got.double() - exact.to(kind).double()).abs() / scale).max().item() if got.numel() else 0.0
        results.append([list(got.shape), str(got.dtype), error, bool(torch.isfinite(got).all())])
extra = {}
w = torch.tensor([[65504.0, 6e-8, -6e-5, 0.0, -0.0]], dtype=torch.float16)
one_hot = torch.eye(5, dtype=torch.float16)
extra["half values"] = (ops.linear(one_hot, w).flatten() == w.flatten()).all().item()
special = torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0]])
for kind in (torch.float16, torch.bfloat16):
    out = ops.linear(torch.tensor([[1.0, 0.0]], dtype=kind), special.to(kind)).flatten()
    extra[f"special {kind}"] = bool(torch.isinf(out[0]) and torch.isnan(out[1]))
many, forty = torch.randn(130, 64, generator=generator).bfloat16(), torch.randn(40, 64, generator=generator).bfloat16()
many[5, 3], many[7, 2] = float("nan"), float("inf")
out = ops.linear(many, forty)
extra["special rows"] = bool(out[5].isnan().all() and out[7].isinf().all()) and out.isfinite().sum().item() == 128 * 40
view = torch.randn(8, 96, generator=generator).to(torch.bfloat16)[:, ::2]
dense = view.contiguous()
x = torch.randn(3, 48, generator=generator).to(torch.bfloat16)
strided, packed = ops.linear(x, view).float(), ops.linear(x, dense).float()
extra["strided weight"] = torch.allclose(strided, packed, rtol=2e-2, atol=2e-2)
wide = torch.randn(2, 3, 48, generator=generator).to(torch.bfloat16)
extra["rank 3"] = list(ops.linear(wide, dense).shape)
try:
    ops.linear(x[:, :5], dense)
    extra["mismatch"] = "no error"
except RuntimeError as error:
    extra["mismatch"] = str(error)
print(json.dumps({"results": results, "extra": extra}))
"""

CASES = [
    [dtype, rows, inner, outer, bias]
    for dtype in ("bfloat16", "float16", "float32")
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33)
    for inner, outer in ((1, 1), (7, 3), (16, 4), (64, 65), (100, 33), (577, 130))
    for bias in (False, True)
]
# Many rows, at depths that are multiples of the blocks or not, and that exceed the first-level cache.
CASES += [
    [dtype, rows, inner, outer, bias]
    for dtype in ("bfloat16", "float32")
    for rows in (128, 161)
    for inner, outer in ((32, 1), (64, 65), (96, 32), (577, 130), (608, 200), (2100, 40))
    for bias in (False, True)
]


@pytest.fixture(scope="module", params=["AVX512_CORE", "AVX2", "DEFAULT"])
def outcome(request: pytest.FixtureRequest) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, request.param],
        input=json.dumps(CASES),
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": request.param, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_shape_is_within_rounding_of_float64(outcome: dict[str, Any]) -> None:
    both = [case for case in CASES for _ in range(2)]
    for case, (shape, dtype, error, finite) in zip(both, outcome["results"], strict=True):
        name, rows, _, outer, _ = case
        assert shape == [rows, outer], case
        assert dtype == f"torch.{name}", case
        assert finite, case
        # One rounding to the result's dtype (2^-8, 2^-11 or 2^-24 relative) and float32 sums.
        assert error <= {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-19}[name], case


def test_half_precision_is_widened_exactly_to_the_ends_of_its_range(outcome: dict[str, Any]) -> None:
    assert outcome["extra"]["half values"]


def test_infinities_and_nans_pass_through(outcome: dict[str, Any]) -> None:
    assert outcome["extra"]["special torch.float16"]
    assert outcome["extra"]["special torch.bfloat16"]
    assert outcome["extra"]["special rows"]


def test_layout_and_rank(outcome: dict[str, Any]) -> None:
    assert outcome["extra"]["strided weight"]
    assert outcome["extra"]["rank 3"] == [2, 3, 8]


def test_shapes_that_do_not_fit_are_named(outcome: dict[str, Any]) -> None:
    assert "does not fit a weight of shape [8, 48]" in outcome["extra"]["mismatch"]
