"""Declares the operator of the linear layer with weights of 8 or 4 bits, and the functions that pack such weights.

Small weights make a layer faster wherever memory bandwidth limits it. Output features are stored in blocks of `width`,
four input positions of each feature side by side, which is the order in which dot-product instructions read them. The
device chooses the width, and whether 8-bit codes are signed (`Device.quantized_layout`). Weights share a scale, and
optionally an offset, in groups along the input dimension. The input is quantized too, to 8 bits with one scale per row
and group, so that the dot product within a group is one of integers.

`packed` quantizes and packs full-precision weights; `packed_codes` packs the codes of a quantized checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm_backplane.device.contract import CodeLayout
from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import Sample, SampleSpace, operator

SMALLEST_AMAX = 2.0**-100
"""An input group whose largest magnitude is below this counts as zero: 127 / amax must stay finite in float32."""

_SPLIT = 4
"""Number of input positions side by side; with 4 bits, a byte holds two positions that are this far apart."""
_PIECE = 1 << 18
"""Number of weights that are packed or unpacked at once, so that temporary memory does not grow with the layer."""


class Packed(NamedTuple):
    """Holds a packed weight."""

    codes: torch.Tensor
    """uint8 [blocks, padded_in / 4, width, 4] (8 bits) or [blocks, padded_in / 8, width, 4] (4 bits); int8 if 8-bit
    codes are signed, that is, stored minus 128."""
    scales: torch.Tensor
    """[blocks, groups, width]."""
    offsets: torch.Tensor | None
    """Like scales; without offsets, the middle code, 128 or 8, means zero."""


def padded_size(fan_in: int, group: int) -> int:
    """Returns the input size of the stored codes: a multiple of the group, and of 8. Group 0 is the whole row."""
    step = group or 8
    return -(-fan_in // step) * step


def _check_format(bits: int, group: int) -> None:
    if bits not in (4, 8):
        raise OperatorError(f"weights of {bits} bits are not supported; use 4 or 8")
    if group < 0 or group % 8:
        raise OperatorError(f"a group of {group} weights is not supported; use a multiple of 8")


def _positions_per_step(bits: int) -> int:
    return _SPLIT * 8 // bits


def empty_codes(rows: int, padded_in: int, bits: int, layout: CodeLayout, device: torch.device | None) -> torch.Tensor:
    """Returns memory for the codes of so many rows. All bytes are 0, which means code 0 or, if signed, the middle."""
    blocks, steps = -(-rows // layout.width), padded_in // _positions_per_step(bits)
    return torch.zeros((blocks, steps, layout.width, _SPLIT), dtype=layout.code_type(bits), device=device)


def packed_codes(codes: torch.Tensor, bits: int, layout: CodeLayout) -> torch.Tensor:
    """Returns codes, uint8 [rows, padded_in], in the operator's layout; the last block is padded with zero rows."""
    (rows, fan_in), width = codes.shape, layout.width
    blocks, step = -(-rows // width), _positions_per_step(bits)
    if rows < blocks * width:
        codes = torch.cat((codes, codes.new_zeros(blocks * width - rows, fan_in)))
    steps = codes.view(blocks, width, fan_in // step, step).transpose(1, 2)
    if bits == 4:
        steps = steps[..., :_SPLIT] | (steps[..., _SPLIT:] << 4)
    if layout.code_type(bits) == torch.int8:
        return (steps ^ 128).contiguous().view(torch.int8)
    return steps.contiguous()


def unpacked_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes that `packed_codes` packed, with the padding: uint8 [blocks * width, padded_in]."""
    if codes.dtype != torch.uint8 and (codes.dtype != torch.int8 or bits != 8):
        raise OperatorError(f"codes of {bits} bits are {codes.dtype}; use uint8, or int8 for signed codes of 8 bits")
    if bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    elif codes.dtype == torch.int8:
        codes = codes.contiguous().view(torch.uint8) ^ 128
    blocks, steps, width, step = codes.shape
    return codes.transpose(1, 2).reshape(blocks * width, steps * step)


def packed_by_group(values: torch.Tensor, width: int) -> torch.Tensor:
    """Returns scales or offsets, [rows, groups], in the operator's layout [blocks, groups, width]."""
    rows, groups = values.shape
    blocks = -(-rows // width)
    if rows < blocks * width:
        values = torch.cat((values, values.new_zeros(blocks * width - rows, groups)))
    return values.view(blocks, width, groups).transpose(1, 2).contiguous()


def _quantize_symmetric(weight: torch.Tensor, bits: int, scale_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales of float32 [rows, groups, group], with zero at the middle code.

    With 8 bits, the largest magnitude gets the highest or the second lowest code. With 4 bits, it gets the lowest code,
    which is one step further from the middle than the highest, and the scale has its sign.
    """
    middle = 2 ** (bits - 1)
    largest = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))
    scale = (largest / (127 if bits == 8 else -8)).to(scale_type).float()
    return (_rounded(weight, scale, middle) + middle).to(torch.uint8), scale.squeeze(-1).to(scale_type)


def _quantize_asymmetric(
    weight: torch.Tensor, bits: int, scale_type: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes, scales and offsets of float32 [rows, groups, group]; codes span from the least to the greatest."""
    low, high = weight.aminmax(dim=-1, keepdim=True)
    offset = low.to(scale_type).float()
    scale = ((high - offset) / (2**bits - 1)).to(scale_type).float()
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    codes = ((weight - offset) * inverse).round_().clamp_(0, 2**bits - 1)
    return codes.to(torch.uint8), scale.squeeze(-1).to(scale_type), offset.squeeze(-1).to(scale_type)


def _rounded(weight: torch.Tensor, scale: torch.Tensor, middle: int) -> torch.Tensor:
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    return (weight * inverse).round_().clamp_(-middle, middle - 1)


def scale_type_for(weight: torch.Tensor, bits: int) -> torch.dtype:
    """Returns float16 if the largest scale is a normal float16, else float32, for weights of unusual magnitude."""
    if weight.numel() == 0:
        return torch.float16
    largest = max(float(weight.amax()), -float(weight.amin())) / 2 ** (bits - 1)
    limits = torch.finfo(torch.float16)
    return torch.float16 if limits.smallest_normal <= largest <= limits.max / 2 or largest == 0 else torch.float32


def packed(
    weight: torch.Tensor,
    bits: int,
    group: int,
    layout: CodeLayout,
    *,
    symmetric: bool = True,
    out_features: int | None = None,
    piece: int = _PIECE,
) -> Packed:
    """Quantizes and packs a full-precision weight, [out, in], in pieces of about `piece` weights.

    Group 0 gives each row one scale. If not symmetric, there are offsets too. Rows from the weight's last up to
    `out_features` are zero.
    """
    _check_format(bits, group)
    rows, fan_in = weight.shape
    padded = padded_size(fan_in, group)
    group, width = group or padded, layout.width
    codes = empty_codes(max(rows, out_features or 0), padded, bits, layout, weight.device)
    scale_type = scale_type_for(weight, bits)
    scales = torch.zeros((len(codes), padded // group, width), dtype=scale_type, device=weight.device)
    offsets = None if symmetric else torch.zeros_like(scales)
    at_once = max(piece // (padded * width), 1)
    for first in range(0, -(-rows // width), at_once):
        values = weight[first * width : (first + at_once) * width].float()
        if padded > fan_in:
            values = torch.nn.functional.pad(values, (0, padded - fan_in))
        grouped = values.view(-1, padded // group, group)
        if offsets is None:
            part_codes, part_scales = _quantize_symmetric(grouped, bits, scale_type)
        else:
            part_codes, part_scales, part_offsets = _quantize_asymmetric(grouped, bits, scale_type)
            packed_offsets = packed_by_group(part_offsets, width)
            offsets[first : first + len(packed_offsets)] = packed_offsets
        packed_part = packed_codes(part_codes.view(-1, padded), bits, layout)
        codes[first : first + len(packed_part)] = packed_part
        scales[first : first + len(packed_part)] = packed_by_group(part_scales, width)
    return Packed(codes, scales, offsets)


def dequantized(codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Returns the dequantized weights, with the padding: float32 [blocks * width, padded_in]."""
    blocks, groups, width = scales.shape
    values = unpacked_codes(codes, bits).float().view(blocks, width, groups, -1)
    by_feature = scales.float().transpose(1, 2).unsqueeze(-1)
    if offsets is None:
        values = (values - 2 ** (bits - 1)) * by_feature
    else:
        values = values * by_feature + offsets.float().transpose(1, 2).unsqueeze(-1)
    return values.view(blocks * width, -1)


def quantized_rows(x: torch.Tensor, groups: int, padded: int) -> torch.Tensor:
    """Returns x rounded to 8 bits, with one scale per row and group: float32 [rows, padded].

    A row that is not finite becomes NaN. In float32: scale = amax / 127, code = x * (127 / amax), rounded half to even
    and clamped to -127..127.
    """
    values = torch.nn.functional.pad(x.float(), (0, padded - x.shape[-1])).view(x.shape[0], groups, padded // groups)
    amax = values.abs().amax(-1, keepdim=True)
    # Not `127 / amax`: PyTorch computes it as 127 * reciprocal(amax), which rounds twice and changes some codes.
    inverse = torch.where(amax < SMALLEST_AMAX, torch.zeros_like(amax), torch.full_like(amax, 127).div(amax))
    codes = (values * inverse).round().clamp(-127, 127)
    finite = torch.isfinite(amax).all(1, keepdim=True)
    rounded = torch.where(finite, codes * (amax / 127), torch.full_like(codes, float("nan")))
    return rounded.view(x.shape[0], padded)


def quantized_samples(space: SampleSpace) -> Iterator[Sample]:
    """Yields samples with codes of any value, also in the padding, which must not affect the result."""
    shapes = (
        # leading, in, out, group (0: the row), width
        ((1,), 32, 16, 32, 16),
        ((3,), 96, 40, 32, 16),
        ((7,), 33, 65, 32, 16),
        ((2, 3), 100, 5, 64, 8),
        ((17,), 130, 33, 128, 32),
        ((5,), 40, 9, 8, 1),
        ((4,), 24, 7, 24, 4),
        ((3,), 52, 20, 0, 16),
        ((33,), 70, 50, 0, 32),
        ((0,), 32, 16, 32, 16),
        ((), 32, 24, 32, 16),
    )
    scale_types = (torch.float16, torch.float32, torch.bfloat16)
    for index, (leading, fan_in, fan_out, group, width) in enumerate(shapes):
        padded = padded_size(fan_in, group)
        blocks, groups = -(-fan_out // width), padded // (group or padded)
        for bits in (8, 4):
            steps, middle = padded // _positions_per_step(bits), 2 ** (bits - 1)
            codes = space.integers(256, blocks, steps, width, _SPLIT, dtype=torch.uint8)
            unit = 1.7 / middle * fan_in**-0.5
            scale_type = scale_types[(index + bits // 4) % 3]
            scales = (space.normal(blocks, groups, width, dtype=torch.float32) * unit).to(scale_type)
            offsets = (space.normal(blocks, groups, width, dtype=torch.float32) * unit * middle).to(scale_type)
            x, bias = space.normal(*leading, fan_in), space.normal(fan_out)
            named = f"{leading} x {fan_in} -> {fan_out}, {bits} bits, groups of {group}, width {width}"
            yield Sample(named, (x, codes, scales, None, bits, fan_out, None))
            yield Sample(f"{named}, offsets and bias", (x, codes, scales, offsets, bits, fan_out, bias))
            if bits == 8:
                signed = codes.view(torch.int8)
                yield Sample(f"{named}, signed", (x, signed, scales, None, bits, fan_out, None))
                yield Sample(f"{named}, signed, offsets and bias", (x, signed, scales, offsets, bits, fan_out, bias))
    codes, scales = space.integers(256, 2, 8, 4, 4, dtype=torch.uint8), space.uniform(2, 1, 4) * 1e-2
    yield Sample("rows of zeros", (space.normal(3, 32) * 0, codes, scales, None, 8, 8, None))
    yield Sample("every second row", (space.normal(6, 32)[::2], codes, scales, None, 8, 8, None))


@operator(
    "(Tensor x, Tensor codes, Tensor scales, Tensor? offsets, int bits, int out_features, Tensor? bias=None) -> Tensor",
    samples=quantized_samples,
)
def quantized_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    out_features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias for a weight of 8- or 4-bit codes, with x rounded to 8 bits per row and group.

    weight = scale * code + offset, or scale * (code - 2 ** (bits - 1)) without offsets. 8-bit codes may be stored
    minus 128, as int8, with the same meaning. Codes of features past out_features and of positions past x's are
    padding. Sums are in float32; a row of x that is not finite gives NaN. For many rows, a kernel may instead round x
    and the weight to bfloat16, which is more accurate.
    """
    _check_format(bits, 0)
    blocks, groups, width = scales.shape
    padded = codes.shape[1] * _positions_per_step(bits)
    if codes.shape[0] != blocks or codes.shape[2] != width or padded % groups or x.shape[-1] > padded:
        raise OperatorError(
            f"codes {tuple(codes.shape)} of {bits} bits, scales {tuple(scales.shape)} and an input of {x.shape[-1]} "
            "do not belong together"
        )
    if out_features > blocks * width:
        raise OperatorError(f"codes of {blocks * width} features cannot give {out_features} output features")
    rows = quantized_rows(x.reshape(-1, x.shape[-1]), groups, padded)
    at_once = max(_PIECE // (padded * width), 1)
    parts = []
    for first in range(0, blocks, at_once):
        part = slice(first, first + at_once)
        weight = dequantized(codes[part], scales[part], None if offsets is None else offsets[part], bits)
        parts.append(torch.nn.functional.linear(rows, weight[: out_features - first * width]))
    out = torch.cat(parts, dim=-1)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], out_features)
