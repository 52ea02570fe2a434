"""Packs the rows of a GGUF layer for the device: one packed weight for consecutive rows of the same GGUF type.

The weights that a layer fuses may have different types (Q4_K_M files store Q and K as Q4_K, and V as Q6_K), and the
operator takes one type. Such a layer computes one type after another and concatenates the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf.decoding import FLOATS, QUANTIZED_TYPES, Type, dequantized
from vllm_backplane.gguf.lazy_tensor import LazyTensor
from vllm_backplane.gguf.packing import packed_rows, require_finite
from vllm_backplane.gguf.tensor_types import GGML_QUANT_SIZES
from vllm_backplane.quantization.packed_parameters import install_packed, set_parameter
from vllm_backplane.runtime import runtime

TypedRows = tuple[Type, torch.Tensor]
"""A GGUF type, and rows of it: uint8 [rows, row_bytes]."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Describes consecutive rows of one GGUF type, packed into a parameter of the layer."""

    rows: int
    bits: int
    """Bits of a code; 0 for values of a floating-point type."""
    name: str
    """Name of the parameter with the codes or values. The names of scales and offsets begin with it."""


def require_lazy(loaded: torch.Tensor, prefix: str) -> LazyTensor:
    """Returns a tensor as it is in the file. Raises BackplaneError if the model's code changed it before loading."""
    if isinstance(loaded, LazyTensor):
        return loaded
    raise BackplaneError(
        f"this model changes the weights of {prefix} before they are loaded, which is not possible for the blocks of a "
        "GGUF file; use the model's original checkpoint"
    )


def shape_mismatch(loaded: torch.Tensor, prefix: str, expected: tuple[int, ...]) -> CheckpointError:
    """Returns the error for a tensor that does not have the shape of the file's metadata."""
    return CheckpointError(
        f"the file has {tuple(loaded.shape)} weights for {prefix}, and its own metadata require {expected}; download "
        "the file again, or convert the model again with a current converter"
    )


def input_shard(tensor: LazyTensor, rows: torch.Tensor, inputs: int, rank: int, prefix: str) -> torch.Tensor:
    """Returns the columns of `rows` with the `inputs` of a rank. Raises CheckpointError if they divide a block."""
    per_block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    if inputs % per_block:
        raise CheckpointError(
            f"{prefix} has {tensor.kind.name} blocks of {per_block} weights, and {inputs} inputs per worker are not a "
            "multiple of that; choose another --tensor-parallel-size"
        )
    shard = inputs // per_block * block_bytes
    return rows[:, rank * shard : (rank + 1) * shard]


def all_floats(parts: Sequence[TypedRows]) -> bool:
    return all(kind in FLOATS for kind, _rows in parts)


def float_values(parts: Sequence[TypedRows], dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the concatenated rows of floating-point types in `dtype`."""
    rows = sum(len(one) for _kind, one in parts)
    columns = dequantized(parts[0][1][:1], parts[0][0]).shape[1]
    values = torch.empty(rows, columns, dtype=dtype, device="cpu") if out is None else out
    first = 0
    for kind, one in parts:
        stored = one.contiguous().view(FLOATS[kind])
        require_finite(stored, kind)  # before they are converted: a large number may be infinite in `dtype`
        values[first : first + len(one)] = stored
        first += len(one)
    return values


def install_packed_rows(
    layer: torch.nn.Module, parts: Sequence[TypedRows], dtype: torch.dtype, device: torch.device, out_features: int
) -> list[PackedRows]:
    """Packs the parts and sets them as parameters of the layer: weight, weight_scale, weight_offset, weight_1 etc.

    Outputs beyond the given rows, up to `out_features`, are zero.
    """
    result: list[PackedRows] = []
    grouped = [(kind, [rows for _kind, rows in same]) for kind, same in groupby(parts, key=lambda part: part[0])]
    for number, (kind, of_kind) in enumerate(grouped):
        name = f"weight_{number}" if number else "weight"
        rows = sum(map(len, of_kind))
        if number == len(grouped) - 1:
            rows += out_features - sum(len(one) for _kind, one in parts)
        if kind in FLOATS:
            values = torch.zeros(rows, of_kind[0].shape[1] // FLOATS[kind].itemsize, dtype=dtype, device="cpu")
            float_values([(kind, one) for one in of_kind], dtype, values)
            set_parameter(layer, name, values, device)
            result.append(PackedRows(rows, 0, name))
            continue
        bits = QUANTIZED_TYPES[kind].bits
        packed = packed_rows(of_kind, kind, runtime().device.quantized_layout(bits), out_features=rows)
        install_packed(layer, packed, name, device)
        result.append(PackedRows(rows, bits, name))
    return result
