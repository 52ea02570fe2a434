"""Codes of a checkpoint, packed into 32-bit words, in the form that the operator `quantized_linear` multiplies.

Nothing is rounded: codes stay what they are, scales are kept in a type that holds them exactly, and a zero point
becomes the offset -scale * zero in float32, which has room for the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch

from vllm_backplane.device.contract import CodeLayout
from vllm_backplane.ops.quantized_linear import Packed, empty_codes, packed_by_group, packed_codes, padded_size

PIECE = 1 << 17
"""Weights that are converted at once, so that temporary memory does not grow with the layer."""

_LARGEST_SPLIT = 128
"""A row that shares one scale is divided into groups of at most this size: the input is rounded by groups."""


@dataclass(frozen=True, slots=True)
class Words:
    """A matrix of codes, of which several lie side by side in a word: int32, two dimensions."""

    data: torch.Tensor
    bits: int
    packed: int
    """The dimension along which a word has several codes."""
    output: int
    """The dimension of output features."""
    order: tuple[int, ...] = ()
    """Where in a word the first code is, the second and so on; if empty, from the lowest bits up."""

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def rows(self, first: int, last: int) -> torch.Tensor:
        """The codes of some output features, uint8 [features, positions]. `first` begins a word."""
        data = self.data if self.output == 0 else self.data.t()
        if self.packed != self.output:
            return self._apart(data[first:last]).flatten(1)
        words = data[first // self.per_word : -(-last // self.per_word)]
        return self._apart(words).transpose(1, 2).flatten(0, 1)[: last - first]

    def _apart(self, words: torch.Tensor) -> torch.Tensor:
        """uint8 [rows, words, codes]. The processors served store the lowest byte of a word first."""
        rows, columns = words.shape
        # Always a copy: a dimension of one counts as contiguous whatever its stride, and bytes need a stride of one.
        codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(rows, columns, 4)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(2)
        return codes[..., list(self.order)] if self.order else codes


@dataclass(frozen=True, slots=True)
class Zeros:
    words: Words
    """As the codes, with groups in the place of input positions."""
    less: int = 0
    """What a stored zero point is too small by."""


def exact(values: torch.Tensor) -> torch.Tensor:
    """float32 values in 16 bits where that changes none of them."""
    for smaller in (torch.float16, torch.bfloat16):
        shortened = values.to(smaller)
        if torch.equal(shortened.float(), values):
            return shortened
    return values


def split_group(fan_in: int) -> int:
    """The group into which a row with one scale is divided, 0 where none divides it."""
    return next((size for size in range(_LARGEST_SPLIT, 31, -8) if fan_in % size == 0), 0)


def adjacent(groups_of: torch.Tensor, groups: int) -> torch.Tensor | None:
    """The order of input positions in which those of a group (`groups_of` names it) lie side by side, int64; None if
    they do already. ValueError where groups are of unequal size."""
    counts = torch.bincount(groups_of.cpu().long(), minlength=groups)
    if len(counts) != groups or bool((counts != len(groups_of) // groups).any()):
        raise ValueError(f"{len(groups_of)} inputs belong to {len(counts)} groups of unequal size")
    order = groups_of.long().argsort(stable=True)
    return None if torch.equal(order.cpu(), torch.arange(len(order))) else order


def repacked(
    codes: Words,
    scales: torch.Tensor,
    zeros: Zeros | None,
    *,
    fan_in: int,
    layout: CodeLayout,
    order: torch.Tensor | None = None,
    split: bool = True,
    piece: int = PIECE,
) -> Packed:
    """A weight, in pieces of about `piece` codes. Scales are [features, groups]; input positions are taken in `order`,
    and `split` divides rows with one scale into groups."""
    features, groups = scales.shape
    bits = codes.bits
    group = (split_group(fan_in) if split else 0) if groups == 1 else fan_in // groups
    repeats = fan_in // group if groups == 1 and group else 1
    padded = padded_size(fan_in, group)
    width = layout.width
    made = empty_codes(features, padded, bits, layout, scales.device)
    scales = scales.float()
    offsets = None if zeros is None else torch.empty_like(scales)
    unit = lcm(width, codes.per_word)
    at_once = max(piece // (padded * unit), 1) * unit
    for first in range(0, features, at_once):
        last = min(first + at_once, features)
        part = codes.rows(first, last)[:, :fan_in]
        if order is not None:
            part = part.index_select(1, order)
        if padded > fan_in:
            part = torch.nn.functional.pad(part, (0, padded - fan_in))
        laid = packed_codes(part, bits, layout)
        made[first // width : first // width + len(laid)] = laid
        if offsets is not None and zeros is not None:
            stored = zeros.words.rows(first, last)[:, :groups].float()
            offsets[first:last] = -scales[first:last] * (stored + zeros.less)
    return Packed(
        made,
        packed_by_group(exact(scales).repeat(1, repeats), width),
        None if offsets is None else packed_by_group(exact(offsets).repeat(1, repeats), width),
    )
