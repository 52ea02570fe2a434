"""The unquantised linear layer: where most of a model's time goes.

The weight keeps the checkpoint's orientation, [out, in]. A device that wants another layout packs its
weights after loading and takes them through an operator of its own; this one never sees them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.ops.operator import Sample, SampleSpace, operator

_SIZES = (((1,), 8, 8), ((3,), 64, 24), ((7,), 33, 65), ((2, 3), 16, 5), ((0,), 16, 8), ((), 16, 8))


def projection_samples(space: SampleSpace) -> Iterator[Sample]:
    """Inputs of x @ weight.T + bias; the weight is scaled so that results stay near one."""
    for leading, fan_in, fan_out in _SIZES:
        x, weight = space.normal(*leading, fan_in), space.normal(fan_out, fan_in) * fan_in**-0.5
        yield Sample(f"{leading} x {fan_in} -> {fan_out}", (x, weight, None))
        yield Sample(f"{leading} x {fan_in} -> {fan_out}, bias", (x, weight, space.normal(fan_out)))
    yield Sample("every second row", (space.normal(6, 16)[::2], space.normal(8, 16) * 0.25, None))


@operator("(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", samples=projection_samples)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias over the last dimension of x; weight is [out, in]."""
    return torch.nn.functional.linear(x, weight, bias)
