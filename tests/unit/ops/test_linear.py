"""Tests the operators of linear layers and logits against sums of products in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operator_checks import FLOAT_TYPES, assert_near, check_over_samples, exact, run, space

from vllm_backplane import ops
from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.linear import blocked
from vllm_backplane.ops.operator import Operator

PROJECTIONS = [ops.linear, ops.logits]


def projected(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    out = np.zeros((*x.shape[:-1], weight.shape[0]))
    for index in np.ndindex(x.shape[:-1]):
        for row, weights in enumerate(weight):
            out[(*index, row)] = sum(a * b for a, b in zip(x[index], weights, strict=True))
    return out if bias is None else out + bias


@pytest.mark.parametrize("op", PROJECTIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_over_samples(op: Operator, dtype: torch.dtype) -> None:
    check_over_samples(op, dtype, projected)


def of_blocks(x: np.ndarray, blocks: np.ndarray, out_features: int, bias: np.ndarray | None = None) -> np.ndarray:
    places = list(np.ndindex(blocks.shape[:-1]))[:out_features]
    weight = np.stack([blocks[place] for place in places])
    return projected(x, weight, bias)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_blocks_over_samples(dtype: torch.dtype) -> None:
    check_over_samples(ops.blocked_linear, dtype, of_blocks)


def test_blocks_hold_the_weight_transposed_and_zeros() -> None:
    weight = space(torch.float32).normal(5, 3)
    blocks = blocked(weight, 4)
    assert blocks.shape == (2, 4, 3)
    assert blocks.stride() == (12, 1, 4), "rows of a block are interleaved"
    assert torch.equal(blocks.reshape(8, 3)[:5], weight)
    assert not blocks[1, 1:].any()


@pytest.mark.parametrize("rows", [3, 40])
def test_blocks_of_no_inputs_leave_the_bias(rows: int) -> None:
    blocks, bias = blocked(torch.empty(6, 0), 4), torch.arange(6.0)
    assert torch.equal(ops.blocked_linear(torch.empty(rows, 0), blocks, 6, bias), bias.expand(rows, 6))
    assert not ops.blocked_linear(torch.empty(rows, 0), blocks, 6).any()


def test_pairs_lie_side_by_side() -> None:
    weight = torch.arange(8.0).view(8, 1)
    pairs = blocked(weight, 8, lanes=2)
    assert pairs.shape == (1, 2, 2, 2, 1)
    assert torch.equal(pairs.reshape(8, 1), weight)
    assert pairs.permute(0, 4, 1, 3, 2).is_contiguous()
    assert pairs.permute(0, 4, 1, 3, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    with pytest.raises(OperatorError, match="is not a multiple of 2"):
        blocked(weight, 8, lanes=3)


@pytest.mark.parametrize("op", PROJECTIONS, ids=lambda op: op.name)
def test_bias_may_be_left_out(op: Operator) -> None:
    x, weight = space(torch.float32).normal(2, 6), space(torch.float32, 1).normal(3, 6)
    assert_near(op(x, weight), projected(exact(x), exact(weight)), "no bias")
    assert_near(op(x, weight, bias=torch.ones(3)), projected(exact(x), exact(weight)) + 1, "by name")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_sums_keep_their_small_terms(dtype: torch.dtype) -> None:
    """A half-precision sum of 4096 ones would stop at 256 (bfloat16) or 2048 (float16)."""
    x = torch.full((1, 4096), 1.0, dtype=dtype)
    (result,) = run(ops.linear, (x, x, None)).returned
    assert result.item() == 4096


def test_transposed_weight() -> None:
    x, weight = space(torch.float32).normal(3, 8), space(torch.float32, 1).normal(8, 5).T
    (result,) = run(ops.linear, (x, weight, None)).returned
    assert_near(result, projected(exact(x), exact(weight)), "weight stored the other way round")
