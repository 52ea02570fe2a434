"""Tests `tally_values` against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operator_checks import FLOAT_TYPES, exact, run, samples, space

from vllm_backplane import ops
from vllm_backplane.ops.tally import FIELDS


def by_numpy(x: np.ndarray, rows: int) -> list[float]:
    x = x.reshape(1, 1) if x.ndim == 0 else x
    x = x if rows < 0 else x[:rows]
    bad = [i for i, row in enumerate(x) if not np.isfinite(row).all()]
    finite = x[np.isfinite(x)]
    return [
        np.isnan(x).sum(),
        np.isinf(x).sum(),
        bad[0] if bad else -1,
        bad[-1] if bad else -1,
        len(bad),
        finite.min() if finite.size else np.inf,
        finite.max() if finite.size else -np.inf,
    ]


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_equals_numpy(dtype: torch.dtype) -> None:
    for sample in samples(ops.tally_values, dtype):
        x, rows, before, slot = sample.args
        table = run(ops.tally_values, sample.args).args[2]
        assert table[slot].tolist() == by_numpy(exact(x), rows), sample.label
        others = [i for i in range(len(table)) if i != slot]
        assert torch.equal(table[others], before[others]), f"{sample.label}: another row was written"


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    shape = (5, 37)
    for place in range(5 * 37):
        x = space(dtype).normal(*shape)
        x.view(-1)[place] = value
        table = run(ops.tally_values, (x, -1, torch.zeros(1, len(FIELDS)), 0)).args[2]
        assert table[0].tolist() == by_numpy(exact(x), -1), place


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, torch.float64])
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    edge = torch.finfo(dtype)
    x = torch.tensor([edge.max, edge.min, edge.tiny, -0.0, edge.smallest_normal / 2], dtype=dtype)
    table = run(ops.tally_values, (x, -1, torch.zeros(1, len(FIELDS)), 0)).args[2]
    assert table[0, :5].tolist() == [0, 0, -1, -1, 0]


def test_doubles_beyond_float32_are_finite() -> None:
    x = torch.tensor([1e300, -1.0], dtype=torch.float64)
    table = run(ops.tally_values, (x, -1, torch.zeros(1, len(FIELDS)), 0)).args[2]
    assert table[0, :5].tolist() == [0, 0, -1, -1, 0]
