"""Repacks a checkpoint's codes, stored in 32-bit words, into the layout of the operator `quantized_linear`.

Nothing is rounded: codes are unchanged, scales keep a type that holds them exactly, and a zero point becomes the offset
-scale * zero_point in float32, which holds the product exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch

from vllm_backplane.device.contract import CodeLayout
from vllm_backplane.ops.quantized_linear import Packed, empty_codes, packed_by_group, packed_codes, padded_size

CHUNK = 1 << 17
"""Weights that are converted at once. It bounds the temporary memory for layers of any size."""

_LARGEST_SPLIT = 128
"""Largest group into which a row with one scale is divided. The operator quantizes its input by groups, so smaller
groups have smaller rounding errors."""


@dataclass(frozen=True, slots=True)
class PackedWords:
    """Holds a matrix of codes, several of which are packed into each 32-bit word."""

    data: torch.Tensor
    """int32, two dimensions."""
    bits: int
    packed_dim: int
    """The dimension along which codes are packed into words."""
    output_dim: int
    """The dimension of output features."""
    word_order: tuple[int, ...] = ()
    """Position of each code in a word, counted from the lowest bits; empty for consecutive codes."""

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def unpack_rows(self, first: int, last: int) -> torch.Tensor:
        """Returns the codes of output features, from `first` to before `last`, as uint8 [features, inputs].

        `first` must be at the beginning of a word.
        """
        data = self.data if self.output_dim == 0 else self.data.t()
        if self.packed_dim != self.output_dim:
            return self._unpack(data[first:last]).flatten(1)
        words = data[first // self.per_word : -(-last // self.per_word)]
        return self._unpack(words).transpose(1, 2).flatten(0, 1)[: last - first]

    def _unpack(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the codes of each word, uint8 [rows, words, codes]. Assumes a little-endian host."""
        rows, columns = words.shape
        # Always copies: a view as bytes needs a stride of 1, and PyTorch counts a dimension of size 1 as contiguous
        # whatever its stride is.
        codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(rows, columns, 4)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(2)
        return codes[..., list(self.word_order)] if self.word_order else codes


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """Holds the zero points of the groups of a weight."""

    words: PackedWords
    """The stored values, packed like codes, with groups in the place of inputs."""
    offset: int = 0
    """Added to each stored value."""


def shortened_exactly(values: torch.Tensor) -> torch.Tensor:
    """Returns float32 values in a 16-bit type if that changes none of them."""
    for smaller in (torch.float16, torch.bfloat16):
        shortened = values.to(smaller)
        if torch.equal(shortened.float(), values):
            return shortened
    return values


def split_group(fan_in: int) -> int:
    """Returns the group size into which a row with one scale is divided, or 0 if none divides it."""
    return next((size for size in range(_LARGEST_SPLIT, 31, -8) if fan_in % size == 0), 0)


def grouping_order(group_index: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Returns the order of inputs, int64, that makes the inputs of each group adjacent; None if they already are.

    `group_index` is the group of each input. Raises ValueError if the groups have different sizes, or if there is no
    such group.
    """
    lowest, highest = (int(one) for one in group_index.aminmax())
    if lowest < 0 or highest >= groups:
        raise ValueError(f"its groups are {lowest} to {highest}, and the layer has {groups}")
    counts = torch.bincount(group_index.cpu().long(), minlength=groups)
    if len(counts) != groups or bool((counts != len(group_index) // groups).any()):
        raise ValueError(f"{len(group_index)} inputs belong to {len(counts)} groups of unequal size")
    order = group_index.long().argsort(stable=True)
    return None if torch.equal(order.cpu(), torch.arange(len(order))) else order


def repack(
    codes: PackedWords,
    scales: torch.Tensor,
    zero_points: ZeroPoints | None,
    *,
    fan_in: int,
    layout: CodeLayout,
    order: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> Packed:
    """Returns a weight in the device's packed layout, converted in chunks of about `chunk` codes.

    Scales are [features, groups]. `order` permutes the inputs. Rows with one scale are divided into groups.
    """
    features, groups = scales.shape
    bits = codes.bits
    group = split_group(fan_in) if groups == 1 else fan_in // groups
    repeats = fan_in // group if groups == 1 and group else 1
    padded = padded_size(fan_in, group)
    width = layout.width
    packed = empty_codes(features, padded, bits, layout, scales.device)
    scales = scales.float()
    offsets = None if zero_points is None else torch.empty_like(scales)
    unit = lcm(width, codes.per_word)
    at_once = max(chunk // (padded * unit), 1) * unit
    for first in range(0, features, at_once):
        last = min(first + at_once, features)
        part = codes.unpack_rows(first, last)[:, :fan_in]
        if order is not None:
            part = part.index_select(1, order)
        if padded > fan_in:
            part = torch.nn.functional.pad(part, (0, padded - fan_in))
        blocks = packed_codes(part, bits, layout)
        packed[first // width : first // width + len(blocks)] = blocks
        if offsets is not None and zero_points is not None:
            stored = zero_points.words.unpack_rows(first, last)[:, :groups].float()
            offsets[first:last] = -scales[first:last] * (stored + zero_points.offset)
    return Packed(
        packed,
        packed_by_group(shortened_exactly(scales).repeat(1, repeats), width),
        None if offsets is None else packed_by_group(shortened_exactly(offsets).repeat(1, repeats), width),
    )
