"""Declares the operators of the unquantized linear layer, which takes most of a model's time.

A checkpoint's weight is [out, in]. A device may want another memory layout (`Device.arrange_linear`), such as blocks of
rows, each transposed: the weight is rearranged once, after loading, and multiplied by `blocked_linear`. The strides
describe the layout, so the reference supports every layout. `linear` takes weights that must not be rearranged, such as
a table that is also the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import Sample, SampleSpace, operator

_SIZES = (((1,), 8, 8), ((3,), 64, 24), ((7,), 33, 65), ((2, 3), 16, 5), ((0,), 16, 8), ((), 16, 8))


def projection_samples(space: SampleSpace) -> Iterator[Sample]:
    """Yields inputs of x @ weight.T + bias; the weight is scaled so that results stay near one."""
    for leading, fan_in, fan_out in _SIZES:
        x, weight = space.normal(*leading, fan_in), space.normal(fan_out, fan_in) * fan_in**-0.5
        yield Sample(f"{leading} x {fan_in} -> {fan_out}", (x, weight, None))
        yield Sample(f"{leading} x {fan_in} -> {fan_out}, bias", (x, weight, space.normal(fan_out)))
    yield Sample("every second row", (space.normal(6, 16)[::2], space.normal(8, 16) * 0.25, None))


@operator("(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", samples=projection_samples)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x @ weight.T + bias over the last dimension of x; weight is [out, in]."""
    return torch.nn.functional.linear(x, weight, bias)


def blocked(weight: torch.Tensor, width: int, lanes: int = 0) -> torch.Tensor:
    """Returns the weight as blocks of `width` rows, each transposed in memory: [blocks, width, in].

    Rows that are missing in the last block are zero. With `lanes`, the rows of a block are paired, row j beside row
    j + lanes: [blocks, pairs, 2, lanes, in].
    """
    rows, fan_in = weight.shape
    count = -(-rows // width)
    if lanes:
        if width % (2 * lanes):
            raise OperatorError(f"the block width {width} is not a multiple of 2 * {lanes} lanes")
        memory = weight.new_zeros((count, fan_in, width // (2 * lanes), lanes, 2))
        blocks = memory.permute(0, 2, 4, 3, 1)
    else:
        blocks = weight.new_zeros((count, fan_in, width)).transpose(1, 2)
    whole = rows // width
    blocks[:whole].copy_(weight[: whole * width].view(whole, *blocks.shape[1:]))
    if whole < count:
        last = weight.new_zeros((width, fan_in))
        last[: rows - whole * width] = weight[whole * width :]
        blocks[whole].copy_(last.view(blocks.shape[1:]))
    return blocks


def blocked_samples(space: SampleSpace) -> Iterator[Sample]:
    """Yields inputs of `blocked_linear` in several layouts."""
    layouts = ((8, 0), (8, 4), (16, 0), (16, 8), (16, 4), (32, 0), (32, 16))
    for width, lanes in layouts:
        named = f"blocks of {width}" + (f", pairs of {lanes}" if lanes else "")
        for sample in projection_samples(space):
            x, weight, bias = sample.args
            yield Sample(f"{sample.label}, {named}", (x, blocked(weight, width, lanes), weight.shape[0], bias))
        for rows in (15, 40):  # more rows than a kernel takes at once, and enough that a kernel packs its input first
            x, weight, bias = space.normal(rows, 37), space.normal(70, 37) * 37**-0.5, space.normal(70)
            yield Sample(f"{rows} x 37 -> 70, {named}", (x, blocked(weight, width, lanes), 70, bias))


@operator("(Tensor x, Tensor blocks, int out_features, Tensor? bias=None) -> Tensor", samples=blocked_samples)
def blocked_linear(
    x: torch.Tensor, blocks: torch.Tensor, out_features: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x @ weight.T + bias for a weight stored in blocks, [..., in]; rows past out_features are padding."""
    return torch.nn.functional.linear(x, blocks.flatten(0, -2)[:out_features], bias)
