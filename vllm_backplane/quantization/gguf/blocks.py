"""Weights of a layer as they are multiplied: runs of rows of one GGUF type, each packed for the device.

The types of a layer's parts may differ (Q4_K_M files have Q and K in Q4_K and V in Q6_K), and a product has one type;
so such a layer computes one product for each run of equal types, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from vllm_backplane.gguf.blocks import FLOATS, LAYOUTS, Type, dequantized
from vllm_backplane.gguf.packing import packed_rows
from vllm_backplane.layers.linear import refuse_loading
from vllm_backplane.runtime import runtime

Rows = tuple[Type, torch.Tensor]
"""A GGUF type, and rows of it: uint8 [rows, row_bytes]."""


@dataclass(frozen=True, slots=True)
class Run:
    rows: int
    bits: int
    """0: values of a floating-point type."""
    name: str
    """Of the parameter with the codes or values; scales and offsets add to it."""


def all_floats(parts: Sequence[Rows]) -> bool:
    return all(kind in FLOATS for kind, _rows in parts)


def values(parts: Sequence[Rows], dtype: torch.dtype, into: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of floating-point types, one below the other, in `dtype`."""
    rows = sum(len(one) for _kind, one in parts)
    columns = dequantized(parts[0][1][:1], parts[0][0]).shape[1]
    made = torch.empty(rows, columns, dtype=dtype, device="cpu") if into is None else into
    first = 0
    for kind, one in parts:
        made[first : first + len(one)] = one.contiguous().view(FLOATS[kind])
        first += len(one)
    return made


def install(
    layer: torch.nn.Module, parts: Sequence[Rows], dtype: torch.dtype, device: torch.device, out_features: int
) -> list[Run]:
    """Pack the parts and give them to the layer as parameters: weight, weight_scale, weight_offset, weight_1 and so on.
    Features past the rows that are there give zero."""
    runs: list[Run] = []
    grouped = [(kind, [rows for _kind, rows in run]) for kind, run in groupby(parts, key=lambda part: part[0])]
    for number, (kind, taken) in enumerate(grouped):
        name = f"weight_{number}" if number else "weight"
        rows = sum(map(len, taken))
        if number == len(grouped) - 1:
            rows += out_features - sum(len(one) for _kind, one in parts)
        if kind in FLOATS:
            made = torch.zeros(rows, taken[0].shape[1] // FLOATS[kind].itemsize, dtype=dtype, device="cpu")
            values([(kind, one) for one in taken], dtype, made)
            _set(layer, name, made, device)
            runs.append(Run(rows, 0, name))
            continue
        bits = LAYOUTS[kind].bits
        packed = packed_rows(taken, kind, runtime().device.quantized_layout(bits), out_features=rows)
        _set(layer, name, packed.codes, device)
        _set(layer, f"{name}_scale", packed.scales, device)
        _set(layer, f"{name}_offset", packed.offsets, device)
        runs.append(Run(rows, bits, name))
    return runs


def _set(layer: torch.nn.Module, name: str, tensor: torch.Tensor | None, device: torch.device) -> None:
    if tensor is None:
        layer.register_parameter(name, None)
        return
    parameter = torch.nn.Parameter(tensor.to(device), requires_grad=False)
    parameter.weight_loader = refuse_loading  # type: ignore[attr-defined]
    setattr(layer, name, parameter)
