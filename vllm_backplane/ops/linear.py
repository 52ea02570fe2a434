"""The unquantised linear layer: where most of a model's time goes.

A checkpoint's weight is [out, in]. A device may want it in blocks of rows instead, each transposed in memory
(`Device.linear_block`): it is rearranged once, after loading, and multiplied by `blocked_linear`. `linear` takes
weights that must stay as they are, such as a table that is also the embedding.
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


def blocked(weight: torch.Tensor, width: int) -> torch.Tensor:
    """The weight as blocks of `width` rows, each transposed in memory: [blocks, width, in], missing rows zero."""
    rows, fan_in = weight.shape
    count = -(-rows // width)
    blocks = weight.new_zeros((count, fan_in, width)).transpose(1, 2)
    for index in range(count):  # one at a time, so that no second copy of the weight comes to be
        part = weight[index * width : (index + 1) * width]
        blocks[index, : len(part)].copy_(part)
    return blocks


def blocked_samples(space: SampleSpace) -> Iterator[Sample]:
    for width in (8, 16, 32):
        for sample in projection_samples(space):
            x, weight, bias = sample.args
            args = (x, blocked(weight, width), weight.shape[0], bias)
            yield Sample(f"{sample.label}, blocks of {width}", args)
        for rows in (15, 40):  # more than a kernel takes at once, and enough to make one prepare the weight
            x, weight, bias = space.normal(rows, 37), space.normal(70, 37) * 37**-0.5, space.normal(70)
            yield Sample(f"{rows} x 37 -> 70, blocks of {width}", (x, blocked(weight, width), 70, bias))


@operator("(Tensor x, Tensor blocks, int out_features, Tensor? bias=None) -> Tensor", samples=blocked_samples)
def blocked_linear(
    x: torch.Tensor, blocks: torch.Tensor, out_features: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias for a weight in blocks of rows, [blocks, width, in]; rows past out_features are filling."""
    return torch.nn.functional.linear(x, blocks.reshape(-1, blocks.shape[-1])[:out_features], bias)
