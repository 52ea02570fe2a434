"""Decodes the quantized blocks of GGUF tensors, in plain PyTorch, into codes, scales and offsets per group.

Every quantized type is `scale * code` or `scale * code + offset` in groups of 16 or 32 along the input dimension, with
codes of at most 8 bits. `grouped` converts blocks into that form exactly: where a scale is a product (`d * sc` in the
K-types) it has at most 19 significant bits, so float32 holds it. `dequantized` computes the values, bit-equal to the
`gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.tensor_types import GGML_QUANT_SIZES
from vllm_backplane.gguf.tensor_types import GGMLQuantizationType as Type

FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values that the 16 codes of IQ4_NL stand for."""


class Grouped(NamedTuple):
    """Holds the codes of some rows, with the scale and the offset of each group."""

    codes: torch.Tensor
    """uint8 [rows, groups, group]."""
    scales: torch.Tensor
    """[rows, groups], float16 where that holds the scales exactly, otherwise float32."""
    offsets: torch.Tensor | None
    """Shape and type of `scales`. None: the type has no offsets, and the code 2 ** (bits - 1) stands for zero."""


class QuantizedType(NamedTuple):
    """Describes a quantized GGUF type: how its blocks become codes, scales and offsets."""

    bits: int
    """4 or 8: the smaller of the two that holds the codes."""
    group: int
    """Weights that share a scale."""
    parse: Callable[[torch.Tensor], Grouped]
    """Decodes uint8 [blocks, bytes]; each row of the result is a block."""
    halves: slice
    """Bytes of a block that are float16. Every value of a block is finite if these are."""


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """Reinterprets pairs of bytes as float16: [blocks, 2 * n] to [blocks, n]."""
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """Returns the low nibbles of all bytes along the last dimension, followed by the high nibbles."""
    return torch.cat((raw & 15, raw >> 4), dim=-1)


def _shifted(raw: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Extracts one bit field per shift: [..., n] to [..., len(shifts), n]."""
    return torch.stack([(raw >> shift) & mask for shift in shifts], dim=-2)


def _q4_0(raw: torch.Tensor) -> Grouped:
    return Grouped(_nibbles(raw[:, 2:]).unsqueeze(1), _halves(raw[:, :2]), None)


def _q4_1(raw: torch.Tensor) -> Grouped:
    return Grouped(_nibbles(raw[:, 4:]).unsqueeze(1), _halves(raw[:, :2]), _halves(raw[:, 2:4]))


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """Unpacks four bytes into 32 bits, lowest bit first."""
    return _shifted(raw.unsqueeze(-1), tuple(range(8)), 1).flatten(1)


def _q5_0(raw: torch.Tensor) -> Grouped:
    codes = _nibbles(raw[:, 6:]) | (_fifth_bits(raw[:, 2:6]) << 4)
    return Grouped((codes + (128 - 16)).unsqueeze(1), _halves(raw[:, :2]), None)


def _q5_1(raw: torch.Tensor) -> Grouped:
    codes = _nibbles(raw[:, 8:]) | (_fifth_bits(raw[:, 4:8]) << 4)
    return Grouped(codes.unsqueeze(1), _halves(raw[:, :2]), _halves(raw[:, 2:4]))


def _q8_0(raw: torch.Tensor) -> Grouped:
    return Grouped((raw[:, 2:] ^ 128).unsqueeze(1), _halves(raw[:, :2]), None)


@cache
def _nonlinear(device: torch.device) -> torch.Tensor:
    """Returns the table of IQ4_NL. It is cached because a captured graph cannot create it from host memory."""
    return torch.tensor([value + 128 for value in _NONLINEAR], dtype=torch.uint8).to(device)


def _iq4_nl(raw: torch.Tensor) -> Grouped:
    return Grouped(_nonlinear(raw.device)[_nibbles(raw[:, 2:]).int()].unsqueeze(1), _halves(raw[:, :2]), None)


def _q2_k(raw: torch.Tensor) -> Grouped:
    packed, numbers = raw[:, :16], _halves(raw[:, 80:84]).float()
    codes = _shifted(raw[:, 16:80].unflatten(1, (2, 32)), (0, 2, 4, 6), 3)
    scales = numbers[:, :1] * (packed & 15).float()
    return Grouped(codes.reshape(-1, 16, 16), scales, -(numbers[:, 1:] * (packed >> 4).float()))


def _q3_k(raw: torch.Tensor) -> Grouped:
    low = _shifted(raw[:, 32:96].unflatten(1, (2, 32)), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    high = _shifted(raw[:, :32], tuple(range(8)), 1).reshape(-1, 16, 16)
    packed = raw[:, 96:108]
    six = _shifted(packed[:, :8], (0, 4), 15).flatten(1) | (_shifted(packed[:, 8:], (0, 2, 4, 6), 3).flatten(1) << 4)
    # A third bit of 0 means that 4 is subtracted from the code. In the operator's form the code 8 stands for zero.
    return Grouped(low + (high << 2) + 4, _halves(raw[:, 108:110]).float() * (six.float() - 32), None)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpacks the eight scales and eight offsets that Q4_K and Q5_K store in 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), offsets.float()


def _k_numbers(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = _halves(raw[:, :4]).float()
    scales, offsets = _six_bits(raw[:, 4:16])
    return numbers[:, :1] * scales, -(numbers[:, 1:] * offsets)


def _q4_k(raw: torch.Tensor) -> Grouped:
    codes = _shifted(raw[:, 16:].unflatten(1, (4, 32)), (0, 4), 15)
    return Grouped(codes.reshape(-1, 8, 32), *_k_numbers(raw))


def _q5_k(raw: torch.Tensor) -> Grouped:
    low = _shifted(raw[:, 48:].unflatten(1, (4, 32)), (0, 4), 15).reshape(-1, 8, 32)
    high = _shifted(raw[:, 16:48], tuple(range(8)), 1)
    return Grouped(low | (high << 4), *_k_numbers(raw))


def _q6_k(raw: torch.Tensor) -> Grouped:
    low = _shifted(raw[:, :128].unflatten(1, (2, 64)), (0, 4), 15).reshape(-1, 8, 32)
    high = _shifted(raw[:, 128:192].unflatten(1, (2, 32)), (0, 2, 4, 6), 3).reshape(-1, 8, 32)
    scales = _halves(raw[:, 208:210]).float() * raw[:, 192:208].contiguous().view(torch.int8).float()
    return Grouped(((low | (high << 4)) + (128 - 32)).view(-1, 16, 16), scales, None)


QUANTIZED_TYPES = {
    Type.Q4_0: QuantizedType(4, 32, _q4_0, slice(0, 2)),
    Type.Q4_1: QuantizedType(4, 32, _q4_1, slice(0, 4)),
    Type.Q5_0: QuantizedType(8, 32, _q5_0, slice(0, 2)),
    Type.Q5_1: QuantizedType(8, 32, _q5_1, slice(0, 4)),
    Type.Q8_0: QuantizedType(8, 32, _q8_0, slice(0, 2)),
    Type.Q2_K: QuantizedType(4, 16, _q2_k, slice(80, 84)),
    Type.Q3_K: QuantizedType(4, 16, _q3_k, slice(108, 110)),
    Type.Q4_K: QuantizedType(4, 32, _q4_k, slice(0, 4)),
    Type.Q5_K: QuantizedType(8, 32, _q5_k, slice(0, 4)),
    Type.Q6_K: QuantizedType(8, 16, _q6_k, slice(208, 210)),
    Type.IQ4_NL: QuantizedType(8, 32, _iq4_nl, slice(0, 2)),
}

SERVED = (*QUANTIZED_TYPES, *FLOATS)


def require_served_type(kind: Type, what: str) -> None:
    """Raises `CheckpointError` for a tensor type that this plugin does not decode."""
    if kind not in SERVED:
        known = ", ".join(one.name for one in SERVED)
        raise CheckpointError(f"{what} has the type {kind.name}, which is not served; use a file of the types {known}")


def grouped(rows: torch.Tensor, kind: Type) -> Grouped:
    """Decodes rows of a quantized type, uint8 [rows, row_bytes]."""
    described, block_bytes = QUANTIZED_TYPES[kind], GGML_QUANT_SIZES[kind][1]
    found = described.parse(rows.reshape(-1, block_bytes))
    count = rows.shape[0]
    return Grouped(
        found.codes.reshape(count, -1, described.group),
        found.scales.reshape(count, -1),
        None if found.offsets is None else found.offsets.reshape(count, -1),
    )


def dequantized(rows: torch.Tensor, kind: Type) -> torch.Tensor:
    """Returns the values of rows, uint8 [rows, row_bytes], as float32 [rows, columns]."""
    if kind in FLOATS:
        return rows.contiguous().view(FLOATS[kind]).float()
    found = grouped(rows, kind)
    values, scales = found.codes.float(), found.scales.float().unsqueeze(-1)
    if found.offsets is None:
        values = (values - 2 ** (QUANTIZED_TYPES[kind].bits - 1)) * scales
    else:
        values = values * scales + found.offsets.float().unsqueeze(-1)
    return values.flatten(1)
