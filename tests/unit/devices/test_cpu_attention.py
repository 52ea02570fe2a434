"""Tests attention of many queries on the cpu device against float64, with and without the processor's AMX tiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import json, math, sys, torch
import vllm_backplane.ops as ops
from vllm_backplane.devices.cpu import native
assert native.fault() is None, native.fault()
generator = torch.Generator().manual_seed(0)
BLOCK = 16

def formula(q, k, v, scale, causal, window, soft_cap, slopes, sinks):
    # Row by row, head by head, in float64; also the same sum of absolute values, which rounding errors are measured by.
    rows, heads, _ = q.shape
    length, group = k.shape[0], heads // k.shape[1]
    out = torch.zeros(rows, heads, v.shape[2], dtype=torch.float64)
    size = torch.zeros_like(out)
    for row in range(rows):
        position = length - rows + row
        last = position if causal else length
        seen = [p for p in range(length) if p <= last and (window == 0 or abs(position - p) < window)]
        for head in range(heads):
            scores = scale * (k[seen, head // group].double() @ q[row, head].double())
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores + slopes[head].double() * (torch.tensor(seen) - position)
            powers = torch.cat([scores, sinks[head].double()[None]]) if sinks is not None else scores
            shares = torch.softmax(powers, 0)[: len(seen)]
            out[row, head] = shares @ v[seen, head // group].double()
            size[row, head] = shares @ v[seen, head // group].double().abs()
    return out, size

def case(dtype, rows, length, heads, kv_heads, head, value_head, causal=True, window=0, soft_cap=0.0, alibi=False,
         sinks=False, poison=None):
    q = torch.randn(rows, heads, head, generator=generator).to(dtype)
    k = torch.randn(length, kv_heads, head, generator=generator).to(dtype)
    v = torch.randn(length, kv_heads, value_head, generator=generator).to(dtype)
    if poison == "query":
        q[rows // 2, 1] = float("nan")
    if poison == "value":
        v[0, 0, 1] = float("inf")
    if poison == "later":  # not seen by the first half of the rows
        k[length - rows // 2, 0, 1] = float("nan")
        v[length - rows // 2, 1, 1] = float("nan")
        v[length - 1, 1, 2] = -float("inf")
    slopes = torch.rand(heads, generator=generator) if alibi else None
    extra = torch.randn(heads, generator=generator) if sinks else None
    blocks = -(-length // BLOCK)
    cache = torch.full((blocks + 3, kv_heads, BLOCK, head + value_head), float("nan")).to(dtype)
    order = torch.randperm(blocks + 3, generator=generator)[:blocks].to(torch.int32)
    for p in range(length):
        cache[order[p // BLOCK], :, p % BLOCK] = torch.cat([k[p], v[p]], dim=-1)
    out = torch.full((rows, heads, value_head), 9.0).to(dtype)
    style = (head**-0.5, causal, window, soft_cap, slopes, extra)
    starts, lengths = torch.tensor([0, rows]).int(), torch.tensor([length]).int()
    keys, values = cache[..., :head], cache[..., head:]
    ops.paged_attention(q, keys, values, order[None], starts, lengths, *style, 1.0, 1.0, out)
    exact, size = formula(q, k, v, *style)
    ragged = None
    if rows == length:
        ragged = torch.full_like(out, 9.0)
        ops.varlen_attention(q, k, v, starts, *style, ragged)
    finite = exact.isfinite()
    found = []
    for got in (out, ragged):
        if got is None:
            continue
        error = ((got.double() - exact).abs() / size)[finite]
        found.append({"error": error.max().item(), "same nan": bool((got.isnan() == exact.isnan()).all()),
                      "same inf": bool((got.isinf() == exact.isinf()).all())})
    return found

results = []
wanted = sys.argv[1] == "tiles"
for given in json.load(sys.stdin) if native.has_amx_tiles() or not wanted else []:
    kind = getattr(torch, given.pop("dtype"))
    results.append(case(kind, **given))
print(json.dumps({"tiles": native.has_amx_tiles(), "results": results}))
"""

PLAIN = {"heads": 6, "kv_heads": 2, "head": 64, "value_head": 64}
VARIANTS: list[dict[str, Any]] = [
    {**PLAIN, "rows": 11, "length": 11},
    {**PLAIN, "rows": 33, "length": 33},
    {**PLAIN, "rows": 50, "length": 113},
    {**PLAIN, "rows": 97, "length": 97},
    {**PLAIN, "rows": 33, "length": 140, "window": 20},
    {**PLAIN, "rows": 40, "length": 40, "causal": False},
    {**PLAIN, "rows": 40, "length": 70, "soft_cap": 2.0},
    {**PLAIN, "rows": 40, "length": 70, "alibi": True},
    {**PLAIN, "rows": 40, "length": 70, "sinks": True, "window": 9},
    {**PLAIN, "rows": 45, "length": 60, "poison": "query"},
    {**PLAIN, "rows": 45, "length": 60, "poison": "value"},
    {**PLAIN, "rows": 45, "length": 45, "poison": "later"},
    {**PLAIN, "rows": 90, "length": 260, "poison": "later", "window": 20},
    {"heads": 2, "kv_heads": 2, "head": 80, "value_head": 80, "rows": 65, "length": 70},
    {"heads": 4, "kv_heads": 1, "head": 33, "value_head": 17, "rows": 31, "length": 80},
    {"heads": 5, "kv_heads": 1, "head": 128, "value_head": 96, "rows": 20, "length": 66},
    {"heads": 40, "kv_heads": 1, "head": 16, "value_head": 8, "rows": 1, "length": 600},
    {"heads": 1, "kv_heads": 1, "head": 1, "value_head": 1, "rows": 37, "length": 37},
]
CASES = [{"dtype": "bfloat16", **variant} for variant in VARIANTS]
CASES += [{"dtype": dtype, **variant} for dtype in ("float16", "float32") for variant in VARIANTS[::3]]


@pytest.fixture(scope="module", params=["AVX512_CORE", "DEFAULT"])
def outcome(request: pytest.FixtureRequest) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "tiles" if request.param == "DEFAULT" else "no tiles"],
        input=json.dumps(CASES),
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": request.param, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    if request.param == "DEFAULT" and not found["tiles"]:
        pytest.skip("this machine has no tiles of bfloat16, or may not use them")
    assert found["tiles"] == (request.param == "DEFAULT")
    return found


def test_every_case_is_within_rounding_of_float64(outcome: dict[str, Any]) -> None:
    # One rounding of the result; with tiles, also one of every softmax weight.
    bounds = {"bfloat16": 2**-7 if outcome["tiles"] else 2**-8, "float16": 2**-10, "float32": 1e-5}
    for case, found in zip(CASES, outcome["results"], strict=True):
        for each in found:
            assert each["error"] <= bounds[case["dtype"]], (case, each)


def test_nan_and_infinities_come_out_where_they_should(outcome: dict[str, Any]) -> None:
    for case, found in zip(CASES, outcome["results"], strict=True):
        for each in found:
            assert each["same nan"], case
            assert each["same inf"], case
