"""Packs the blocks of GGUF tensors into the layout of the operator `quantized_linear`.

Nothing is rounded: codes, scales and offsets are those of the file (`decoding.py`). Codes of 5 and 6 bits, and the
values of IQ4_NL, take 8 bits each in this layout. Codes of 2 and 3 bits take 4. The scales of K-types are float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from vllm_backplane.device.contract import CodeLayout
from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.decoding import QUANTIZED_TYPES, Type, grouped
from vllm_backplane.gguf.file import Tensor
from vllm_backplane.gguf.model_files import TensorLocation
from vllm_backplane.gguf.tensor_types import GGML_QUANT_SIZES
from vllm_backplane.ops.quantized_linear import Packed, empty_codes, packed_codes

_CHUNK = 1 << 20
"""Weights that are converted at once, so that temporary memory does not grow with the layer."""


def bytes_in_memory(tensor: Tensor, dtype: torch.dtype) -> int:
    """Returns the bytes of a packed tensor without padding, or in `dtype` for a type that is not quantized."""
    weights = prod(tensor.shape)
    described = QUANTIZED_TYPES.get(tensor.type)
    if described is None:
        return weights * dtype.itemsize
    sample = grouped(torch.zeros(1, GGML_QUANT_SIZES[tensor.type][1], dtype=torch.uint8), tensor.type)
    numbers = sample.scales.itemsize * (1 if sample.offsets is None else 2)
    return weights * described.bits // 8 + weights // described.group * numbers


def mapped_rows(location: TensorLocation) -> torch.Tensor:
    """Returns a view of a tensor's bytes in the mapped file, uint8 [rows, row_bytes]. Nothing is read yet."""
    with warnings.catch_warnings():
        # torch warns once that the mapping is read-only, which is intended.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(location.file.bytes_of(location.tensor), dtype=torch.uint8)
    return flat.view(-1, location.tensor.row_bytes)


def packed_rows(
    parts: Sequence[torch.Tensor], kind: Type, layout: CodeLayout, *, out_features: int = 0, chunk: int = _CHUNK
) -> Packed:
    """Packs the concatenated rows of `parts`, each uint8 [rows, row_bytes] of a quantized type.

    Zero rows are appended up to `out_features`. `chunk` is the number of weights that are converted at once.
    """
    in_file, width = QUANTIZED_TYPES[kind], layout.width
    rows = max(sum(len(part) for part in parts), out_features)
    sample = grouped(parts[0][:1], kind)
    groups = sample.scales.shape[1]
    fan_in = groups * in_file.group
    codes = empty_codes(rows, fan_in, in_file.bits, layout, torch.device("cpu"))
    scales = torch.zeros((len(codes), groups, width), dtype=sample.scales.dtype)
    offsets = None if sample.offsets is None else torch.zeros_like(scales)
    chunk_rows = max(chunk // (fan_in * width), 1) * width
    first = 0
    for taken in _chunks(parts, chunk_rows):
        found = grouped(taken, kind)
        for numbers in (found.scales, found.offsets):
            if numbers is not None:
                require_finite(numbers, kind)
        packed = packed_codes(found.codes.flatten(1), in_file.bits, layout)
        last = first + len(packed)
        codes[first:last] = packed
        _interleave(scales[first:last], found.scales)
        if offsets is not None and found.offsets is not None:
            _interleave(offsets[first:last], found.offsets)
        first = last
    return Packed(codes, scales, offsets)


def require_finite(values: torch.Tensor, kind: Type) -> None:
    """Raises CheckpointError if values of a tensor in the file are NaN or infinite: they spread to all outputs."""
    for part in values.reshape(-1).split(_CHUNK):
        if not bool(torch.isfinite(part).all()):
            raise CheckpointError(
                f"a tensor of type {kind.name} in the GGUF file has NaN or infinite values; download the file again"
            )


def require_finite_blocks(rows: torch.Tensor, kind: Type) -> None:
    """Raises CheckpointError if rows of a quantized type, uint8 [rows, row_bytes], have values that are not finite. It
    reads the float16 numbers of the blocks only."""
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[kind][1])[:, QUANTIZED_TYPES[kind].halves]
    for part in blocks.split(_CHUNK):
        require_finite(part.contiguous().view(torch.float16), kind)


def _interleave(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copies [rows, groups] into [blocks, groups, width]. Rows beyond the last value are not written."""
    width = into.shape[2]
    whole = len(values) // width
    into[:whole] = values[: whole * width].view(whole, width, values.shape[1]).transpose(1, 2)
    if len(values) > whole * width:
        into[whole, :, : len(values) - whole * width] = values[whole * width :].t()


def _chunks(parts: Iterable[torch.Tensor], chunk_rows: int) -> Iterator[torch.Tensor]:
    """Yields the rows of `parts` in chunks of `chunk_rows`; the last chunk may be smaller."""
    waiting: list[torch.Tensor] = []
    count = 0
    for part in parts:
        begin = 0
        while begin < len(part):
            taken = part[begin : begin + chunk_rows - count]
            waiting.append(taken)
            begin, count = begin + len(taken), count + len(taken)
            if count == chunk_rows:
                yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
                waiting, count = [], 0
    if waiting:
        yield torch.cat(waiting)
