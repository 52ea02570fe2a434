"""Tensors of a GGUF file in the form that the operator `quantized_linear` multiplies.

Nothing is rounded: codes, scales and offsets are the file's (see `blocks`). Codes of 5 and 6 bits, and the values of
IQ4_NL, take 8 bits each there, codes of 2 and 3 bits take 4, and the K-types' scales are float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from gguf import GGML_QUANT_SIZES

from vllm_backplane.device.contract import CodeLayout
from vllm_backplane.gguf.blocks import LAYOUTS, Type, grouped
from vllm_backplane.gguf.file import Tensor
from vllm_backplane.gguf.model_files import Placed
from vllm_backplane.ops.quantized_linear import Packed, empty_codes, packed_codes

_PIECE = 1 << 20
"""Weights that are converted at once, so that temporary memory does not grow with the layer."""


def bytes_in_memory(tensor: Tensor, dtype: torch.dtype) -> int:
    """What a tensor takes where it is multiplied, or kept in `dtype`; without what fills blocks up."""
    weights = prod(tensor.shape)
    layout = LAYOUTS.get(tensor.type)
    if layout is None:
        return weights * dtype.itemsize
    sample = grouped(torch.zeros(1, GGML_QUANT_SIZES[tensor.type][1], dtype=torch.uint8), tensor.type)
    numbers = sample.scales.itemsize * (1 if sample.offsets is None else 2)
    return weights * layout.bits // 8 + weights // layout.group * numbers


def mapped(placed: Placed) -> torch.Tensor:
    """The bytes of a tensor where the file is mapped, uint8 [rows, row_bytes]; nothing is read yet."""
    with warnings.catch_warnings():
        # The mapping cannot be written to, of which torch warns once.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(placed.file.bytes_of(placed.tensor), dtype=torch.uint8)
    return flat.view(-1, placed.tensor.row_bytes)


def packed_rows(
    parts: Sequence[torch.Tensor], kind: Type, layout: CodeLayout, *, out_features: int = 0, piece: int = _PIECE
) -> Packed:
    """The rows of `parts`, each uint8 [rows, row_bytes] of a quantized type, one below the other. Rows that are missing
    to `out_features` are zero."""
    stored, width = LAYOUTS[kind], layout.width
    rows = max(sum(len(part) for part in parts), out_features)
    sample = grouped(parts[0][:1], kind)
    groups = sample.scales.shape[1]
    fan_in = groups * stored.group
    codes = empty_codes(rows, fan_in, stored.bits, layout, torch.device("cpu"))
    scales = torch.zeros((len(codes), groups, width), dtype=sample.scales.dtype)
    offsets = None if sample.offsets is None else torch.zeros_like(scales)
    at_once = max(piece // (fan_in * width), 1) * width
    first = 0
    for taken in _pieces(parts, at_once):
        found = grouped(taken, kind)
        laid = packed_codes(found.codes.flatten(1), stored.bits, layout)
        last = first + len(laid)
        codes[first:last] = laid
        _lay(scales[first:last], found.scales)
        if offsets is not None and found.offsets is not None:
            _lay(offsets[first:last], found.offsets)
        first = last
    return Packed(codes, scales, offsets)


def _lay(into: torch.Tensor, values: torch.Tensor) -> None:
    """[rows, groups] into [blocks, groups, width]; rows that are missing stay as they are."""
    width = into.shape[2]
    whole = len(values) // width
    into[:whole] = values[: whole * width].view(whole, width, values.shape[1]).transpose(1, 2)
    if len(values) > whole * width:
        into[whole, :, : len(values) - whole * width] = values[whole * width :].t()


def _pieces(parts: Iterable[torch.Tensor], at_once: int) -> Iterator[torch.Tensor]:
    """`at_once` rows at a time, the last time what is left."""
    waiting: list[torch.Tensor] = []
    count = 0
    for part in parts:
        begin = 0
        while begin < len(part):
            taken = part[begin : begin + at_once - count]
            waiting.append(taken)
            begin, count = begin + len(taken), count + len(taken)
            if count == at_once:
                yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
                waiting, count = [], 0
    if waiting:
        yield torch.cat(waiting)
