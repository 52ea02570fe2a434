"""Tests the RMS norm operators against their definition, written with numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from operator_checks import FLOAT_TYPES, HALF_TYPES, assert_near, check_over_samples, exact, run, space

from vllm_backplane import ops


def rms(x: np.ndarray, eps: float, size: int | None) -> np.ndarray:
    out = np.empty_like(x)
    for index in np.ndindex(x.shape[:-1]):
        part = x[index][:size]
        out[index] = x[index] / np.sqrt(sum(v * v for v in part) / len(part) + eps)
    return out


def plain(x: np.ndarray, weight: np.ndarray | None, eps: float, size: int | None = None) -> np.ndarray:
    return rms(x, eps, size) * (1.0 if weight is None else weight)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    check_over_samples(ops.rms_norm, dtype, plain)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_gemma_rms_norm(dtype: torch.dtype) -> None:
    check_over_samples(ops.gemma_rms_norm, dtype, lambda x, w, eps: rms(x, eps, None) * (1 + w))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_fused_add_rms_norm(dtype: torch.dtype) -> None:
    check_over_samples(
        ops.fused_add_rms_norm,
        dtype,
        lambda x, residual, weight, *rest: (plain(x + residual, weight, *rest), x + residual),
    )


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_fused_add_gemma_rms_norm(dtype: torch.dtype) -> None:
    check_over_samples(
        ops.fused_add_gemma_rms_norm,
        dtype,
        lambda x, residual, w, eps: (rms(x + residual, eps, None) * (1 + w), x + residual),
    )


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_squares_that_overflow_half_precision(dtype: torch.dtype) -> None:
    x, weight = space(dtype).normal(3, 40) * 2000, space(dtype, 1).normal(40)
    (result,) = run(ops.rms_norm, (x, weight, 1e-6)).returned
    assert torch.isfinite(result).all()
    assert_near(result, plain(exact(x), exact(weight), 1e-6), "large")


def test_weight_of_a_wider_type_keeps_its_precision() -> None:
    x, weight = space(torch.bfloat16).normal(2, 16), space(torch.float32).normal(16)
    (result,) = run(ops.rms_norm, (x, weight, 1e-6)).returned
    assert result.dtype == torch.bfloat16
    # The result is rounded once, so the error is at most half a unit in the last place of bfloat16.
    assert_near(result, plain(exact(x), exact(weight), 1e-6), "mixed types", rtol=2**-8, atol=0.0)


def test_epsilon_carries_a_zero_row() -> None:
    (result,) = run(ops.rms_norm, (torch.zeros(2, 8), torch.ones(8), 1e-5)).returned
    assert torch.equal(result, torch.zeros(2, 8))
