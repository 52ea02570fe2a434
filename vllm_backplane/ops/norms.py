"""Declares the operators for RMS normalization, plain and fused with the residual addition.

Statistics are computed in float32 for every input dtype: half-precision squares overflow at 256 (fp16) or
lose the small terms (bf16). The weight is applied in its own dtype, and the result has the input's.
Gemma's variant scales by ``1 + weight``, in float32 until the last rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.ops.operator import Sample, SampleSpace, operator

_SHAPES = ((1, 8), (3, 64), (7, 577), (2, 5, 32), (0, 16))


def _normalized(x: torch.Tensor, eps: float, variance_size: int | None) -> torch.Tensor:
    wide = x.float()
    measured = wide if variance_size is None else wide[..., :variance_size]
    return wide * torch.rsqrt(measured.square().mean(-1, keepdim=True) + eps)


def _weighted(normalized: torch.Tensor, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if weight is None:
        return normalized.to(dtype)
    return (normalized.to(weight.dtype) * weight).to(dtype)


def _norm_samples(space: SampleSpace) -> Iterator[Sample]:
    for shape in _SHAPES:
        yield Sample(f"{shape}", (space.normal(*shape), space.normal(shape[-1]), 1e-5))
    yield Sample("no weight", (space.normal(4, 32), None, 1e-6))
    yield Sample("partial variance", (space.normal(4, 32), space.normal(32), 1e-6, 24))
    yield Sample("large values", (space.normal(2, 64) * 300, space.normal(64), 1e-6))


@operator("(Tensor x, Tensor? weight, float eps, int? variance_size=None) -> Tensor", samples=_norm_samples)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, variance_size: int | None = None
) -> torch.Tensor:
    """Returns x / rms(x) * weight over the last dimension; the rms may be that of its first variance_size elements."""
    return _weighted(_normalized(x, eps, variance_size), weight, x.dtype)


def _fused_samples(space: SampleSpace) -> Iterator[Sample]:
    for sample in _norm_samples(space):
        x, *rest = sample.args
        yield Sample(sample.label, (x, space.normal(*x.shape), *rest))


@operator(
    "(Tensor x, Tensor residual, Tensor? weight, float eps, int? variance_size=None) -> (Tensor, Tensor)",
    samples=_fused_samples,
)
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual); the norm uses the sum in float32."""
    total = x.float() + residual.float()
    return _weighted(_normalized(total, eps, variance_size), weight, x.dtype), total.to(x.dtype)


def _gemma_samples(space: SampleSpace) -> Iterator[Sample]:
    for shape in _SHAPES:
        yield Sample(f"{shape}", (space.normal(*shape), space.normal(shape[-1]), 1e-6))


@operator("(Tensor x, Tensor weight, float eps) -> Tensor", samples=_gemma_samples)
def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / rms(x) * (1 + weight), multiplied in float32."""
    return (_normalized(x, eps, None) * (1.0 + weight.float())).to(x.dtype)


def _gemma_fused_samples(space: SampleSpace) -> Iterator[Sample]:
    for sample in _gemma_samples(space):
        x, *rest = sample.args
        yield Sample(sample.label, (x, space.normal(*x.shape), *rest))


@operator("(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)", samples=_gemma_fused_samples)
def fused_add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (gemma_rms_norm(x + residual), x + residual)."""
    total = x.float() + residual.float()
    return (_normalized(total, eps, None) * (1.0 + weight.float())).to(x.dtype), total.to(x.dtype)
