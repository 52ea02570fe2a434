"""Defines a tensor subclass whose values stay in the mapped GGUF file, as quantized blocks, until they are used.

vLLM's models pass tensors from the loader to layers by name. A layer that computes with blocks takes `rows`. Any other
operation on such a tensor (the copy into a norm's weight, for example) gets the values, which are decoded for that
operation. Stacking and unbinding experts works on the blocks, without decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from vllm_backplane.gguf.architectures import CheckpointTensor
from vllm_backplane.gguf.decoding import FLOATS, Type, dequantized
from vllm_backplane.gguf.packing import mapped_rows, require_finite


class LazyTensor(torch.Tensor):
    """Represents a tensor of the file, which is decoded when an operation needs its values."""

    rows: torch.Tensor
    """The mapped bytes, uint8 [rows, row_bytes]."""
    kind: Type

    @staticmethod
    def __new__(cls, rows: torch.Tensor, kind: Type, shape: tuple[int, ...]) -> LazyTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=FLOATS.get(kind, torch.float32), device=torch.device("cpu")
        )
        made.rows, made.kind = rows, kind
        return made

    def values(self) -> torch.Tensor:
        """Returns the decoded values: float32, or the file's own type where that is a floating-point type."""
        if self.kind in FLOATS:
            found = self.rows.contiguous().view(FLOATS[self.kind])
        else:
            found = dequantized(self.rows, self.kind)
        require_finite(found, self.kind)
        return found.view(self.shape)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.unsqueeze.default and args[1] == 0:
            return LazyTensor(args[0].rows, args[0].kind, (1, *args[0].shape))
        if func is torch.ops.aten.unbind.int and (len(args) == 1 or args[1] == 0) and args[0].dim() == 3:
            count, *shape = args[0].shape
            return [LazyTensor(rows, args[0].kind, tuple(shape)) for rows in args[0].rows.chunk(count)]

        def decoded(value: Any) -> Any:
            return value.values() if isinstance(value, LazyTensor) else value

        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs or {}))


def named_tensors(one: CheckpointTensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and tensors that vLLM's model expects for one tensor of the file: one, or one per expert."""
    tensor = lazy_tensor(one)
    if not one.experts:
        yield one.name, tensor
        return
    for expert, weight in enumerate(tensor.unbind()):
        yield one.name.format(expert), weight


def lazy_tensor(one: CheckpointTensor) -> torch.Tensor:
    """Returns a tensor as it was before conversion: rows in the checkpoint's order, norms without the added 1."""
    rows, tensor = mapped_rows(one.location), one.location.tensor
    if one.permuted_heads and len(tensor.shape) == 1:
        # A bias is one row, and its elements are in the order of the weight's rows.
        return _unpermuted(LazyTensor(rows, tensor.type, tensor.shape).values(), one.permuted_heads)
    if one.permuted_heads:
        rows = _unpermuted(rows, one.permuted_heads)
    shape = (1, *tensor.shape) if one.single_row and len(tensor.shape) == 1 else tensor.shape
    lazy = LazyTensor(rows, tensor.type, shape)
    return lazy.values().float() - 1 if one.plus_one else lazy


def _unpermuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders rows from (half, pair) back to (pair, half) within each head."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(values.shape)
