"""Tests the activation operators against their formulas, written with numpy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from operator_checks import FLOAT_TYPES, check_over_samples, run, space

from vllm_backplane import ops
from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import declared

Array = np.ndarray
erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Array) -> Array:
    # By tanh, because exp(-x) overflows for values for which the float32 reference does not.
    return (np.tanh(x / 2) + 1) / 2


def gelu(x: Array, approximate: str) -> Array:
    if approximate == "none":
        return x * (1 + erf(x / math.sqrt(2))) / 2
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def split(x: Array) -> tuple[Array, Array]:
    first, second = np.split(x, 2, axis=-1)
    return first, second


def gated(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, *rest: function(*split(x), *rest)


def swigluoai(x: Array, alpha: float, limit: float) -> Array:
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    gate, up = np.minimum(pairs[..., 0], limit), np.clip(pairs[..., 1], -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + 1)


def clamped(gate: Array, up: Array, limit: float, alpha: float, beta: float) -> Array:
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + beta)


FORMULAS: dict[str, Callable[..., Array]] = {
    "silu_and_mul": gated(lambda gate, up: gate * sigmoid(gate) * up),
    "mul_and_silu": gated(lambda up, gate: up * gate * sigmoid(gate)),
    "gelu_and_mul": gated(lambda gate, up, approximate: gelu(gate, approximate) * up),
    "fatrelu_and_mul": gated(lambda gate, up, threshold: gate * (gate > threshold) * up),
    "silu_and_mul_with_clamp": gated(clamped),
    "swigluoai_and_mul": swigluoai,
    "gelu": gelu,
    "gelu_new": lambda x: gelu(x, "tanh"),
    "gelu_fast": lambda x: gelu(x, "tanh"),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu2": lambda x: np.where(x > 0, x * x, 0),
}


def test_every_activation_has_a_formula_here() -> None:
    assert {name for name, op in declared().items() if op.family == "activations"} == set(FORMULAS)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_over_samples(name: str, dtype: torch.dtype) -> None:
    check_over_samples(getattr(ops, name), dtype, FORMULAS[name])


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_negative_tail_is_not_lost_to_cancellation(name: str, dtype: torch.dtype) -> None:
    """gelu(-3) is -0.0036; 1 + tanh, evaluated in half precision, keeps at most one digit of it."""
    x = torch.tensor([[-3.0, -2.5, -2.0, -1.5]], dtype=dtype)
    (result,) = run(getattr(ops, name), (x,)).returned
    expected = gelu(x.double().numpy(), "tanh")
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=torch.finfo(dtype).eps)


def test_saturated_inputs_stay_finite() -> None:
    x = torch.tensor([[-200.0, 200.0, 3.0, 3.0]])
    (result,) = run(ops.silu_and_mul, (x,)).returned
    np.testing.assert_allclose(result.double().numpy(), [[0.0, 600.0]], atol=1e-6)


def test_threshold_itself_is_cut() -> None:
    (result,) = run(ops.fatrelu_and_mul, (torch.tensor([[0.5, 0.75, 2.0, 2.0]]), 0.5)).returned
    assert result.tolist() == [[0.0, 1.5]]


@pytest.mark.parametrize("name", ["gelu", "gelu_and_mul"])
def test_unknown_approximation_is_refused(name: str) -> None:
    with pytest.raises(OperatorError, match="'none' or 'tanh'"):
        getattr(ops, name).reference(torch.zeros(2, 4), "sigmoid")


@pytest.mark.parametrize("name", [name for name in FORMULAS if "_and_" in name])
def test_odd_width_is_refused(name: str) -> None:
    op = getattr(ops, name)
    extra = next(iter(op.samples(space(torch.float32)))).args[1:]
    with pytest.raises(OperatorError, match="even"):
        op.reference(torch.zeros(2, 5), *extra)


@pytest.mark.parametrize("name", FORMULAS)
def test_result_is_contiguous_for_a_transposed_input(name: str) -> None:
    op = getattr(ops, name)
    extra = next(iter(op.samples(space(torch.float32)))).args[1:]
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).T
    (result,) = run(op, (x, *extra)).returned
    assert result.is_contiguous()
    np.testing.assert_allclose(
        result.double().numpy(), FORMULAS[name](x.double().numpy(), *extra), rtol=1e-5, atol=1e-6
    )
