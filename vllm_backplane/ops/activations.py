"""Declares the operators for activation functions, plain and gated.

Each is computed in float32 and rounded once, to the input's dtype: several of the formulas cancel (1 + tanh
near -1) and lose all precision in half precision. The result is contiguous for any strides of the input.
Gated activations take the gate and up projections side by side in the last dimension and return half of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import Sample, SampleGenerator, SampleSpace, operator

_SHAPES = ((1, 2), (3, 64), (5, 130), (2, 3, 32), (0, 16))
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    if size % 2:
        raise OperatorError(
            f"the last dimension of a gated activation is {size}; it must be even, to hold the gate and up halves"
        )
    wide = x.float()
    return wide[..., : size // 2], wide[..., size // 2 :]


def _rounded(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return wide.to(dtype).contiguous()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def gelu_of(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Returns gelu(x) in the dtype of x; `approximate` is 'none' (erf) or 'tanh'."""
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))
    raise OperatorError(f"unknown gelu approximation {approximate!r}; use 'none' or 'tanh'")


def _samples(*extra: tuple[object, ...]) -> SampleGenerator:
    """Yields every shape with each set of further arguments; some values are large enough to reach clamps and tails."""

    def generate(space: SampleSpace) -> Iterator[Sample]:
        for arguments in extra or ((),):
            for shape in _SHAPES:
                yield Sample(f"{shape} {arguments}", (space.normal(*shape), *arguments))
            yield Sample(f"large values {arguments}", (space.normal(4, 32) * 10, *arguments))
            yield Sample(f"every second row {arguments}", (space.normal(6, 32)[::2], *arguments))

    return generate


@operator("(Tensor x) -> Tensor", samples=_samples())
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, where x = [gate, up]."""
    gate, up = _halves(x)
    return _rounded(_silu(gate) * up, x.dtype)


@operator("(Tensor x) -> Tensor", samples=_samples())
def mul_and_silu(x: torch.Tensor) -> torch.Tensor:
    """Returns up * silu(gate), where x = [up, gate]."""
    up, gate = _halves(x)
    return _rounded(up * _silu(gate), x.dtype)


@operator("(Tensor x, str approximate) -> Tensor", samples=_samples(("none",), ("tanh",)))
def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Returns gelu(gate) * up, where x = [gate, up]; approximate is 'none' or 'tanh'."""
    gate, up = _halves(x)
    return _rounded(gelu_of(gate, approximate) * up, x.dtype)


@operator("(Tensor x, float threshold) -> Tensor", samples=_samples((0.0,), (0.5,)))
def fatrelu_and_mul(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Returns gate * up where gate is above the threshold, else 0; x = [gate, up]."""
    gate, up = _halves(x)
    return _rounded(torch.where(gate > threshold, gate, 0.0) * up, x.dtype)


@operator(
    "(Tensor x, float limit, float alpha, float beta) -> Tensor",
    samples=_samples((7.0, 1.0, 0.0), (1.5, 1.702, 1.0)),
)
def silu_and_mul_with_clamp(x: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    """Returns g * sigmoid(alpha * g) * (u + beta), g clamped to at most limit, u to [-limit, limit]; x = [g, u]."""
    gate, up = _halves(x)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _rounded(gate * torch.sigmoid(alpha * gate) * (up + beta), x.dtype)


@operator("(Tensor x, float alpha, float limit) -> Tensor", samples=_samples((1.702, 7.0), (1.0, 1.5)))
def swigluoai_and_mul(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Returns g * sigmoid(alpha * g) * (u + 1), clamped; gate and up alternate: x = [g0, u0, g1, u1, ...]."""
    if x.shape[-1] % 2:
        raise OperatorError(f"swigluoai_and_mul: the last dimension is {x.shape[-1]}; it must be even")
    wide = x.float()
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    return _rounded(gate * torch.sigmoid(alpha * gate) * (up + 1.0), x.dtype)


@operator("(Tensor x, str approximate) -> Tensor", samples=_samples(("none",), ("tanh",)))
def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Returns the Gaussian error linear unit of x; approximate is 'none' (erf) or 'tanh'."""
    return _rounded(gelu_of(x.float(), approximate), x.dtype)


@operator("(Tensor x) -> Tensor", samples=_samples())
def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """Returns the tanh approximation of gelu as GPT-2 defines it."""
    return _rounded(gelu_of(x.float(), "tanh"), x.dtype)


@operator("(Tensor x) -> Tensor", samples=_samples())
def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """Returns the tanh approximation of gelu with sqrt(2/pi) given to ten digits."""
    wide = x.float()
    inner = wide * 0.7978845608 * (1.0 + 0.044715 * wide * wide)
    return _rounded(0.5 * wide * (1.0 + torch.tanh(inner)), x.dtype)


@operator("(Tensor x) -> Tensor", samples=_samples())
def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Returns x * sigmoid(1.702 * x)."""
    wide = x.float()
    return _rounded(wide * torch.sigmoid(1.702 * wide), x.dtype)


@operator("(Tensor x) -> Tensor", samples=_samples())
def relu2(x: torch.Tensor) -> torch.Tensor:
    """Returns max(x, 0) squared."""
    return _rounded(x.float().clamp(min=0.0).square(), x.dtype)
