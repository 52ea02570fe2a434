"""A tensor whose values still lie as blocks in the mapped file.

vLLM's models hand tensors from the loader to layers by name. A layer that multiplies blocks asks for `rows`; anything
else that touches such a tensor (the copy into a norm's weight, say) sees the values, decoded at that moment. Experts
may be put together and taken apart: that is done to the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from vllm_backplane.gguf.architectures import Named
from vllm_backplane.gguf.blocks import FLOATS, Type, dequantized
from vllm_backplane.gguf.packing import mapped


class StoredTensor(torch.Tensor):
    rows: torch.Tensor
    """uint8 [rows, row_bytes]."""
    kind: Type

    @staticmethod
    def __new__(cls, rows: torch.Tensor, kind: Type, shape: tuple[int, ...]) -> StoredTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=FLOATS.get(kind, torch.float32), device=torch.device("cpu")
        )
        made.rows, made.kind = rows, kind
        return made

    def values(self) -> torch.Tensor:
        """Decoded: float32, or the type of the file where that is a floating-point one."""
        if self.kind in FLOATS:
            return self.rows.contiguous().view(FLOATS[self.kind]).view(self.shape)
        return dequantized(self.rows, self.kind).view(self.shape)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.unsqueeze.default and args[1] == 0:
            return StoredTensor(args[0].rows, args[0].kind, (1, *args[0].shape))
        if func is torch.ops.aten.unbind.int and (len(args) == 1 or args[1] == 0) and args[0].dim() == 3:
            count, *shape = args[0].shape
            return [StoredTensor(rows, args[0].kind, tuple(shape)) for rows in args[0].rows.chunk(count)]

        def decoded(value: Any) -> Any:
            return value.values() if isinstance(value, StoredTensor) else value

        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs or {}))


def weights(one: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as a checkpoint has them."""
    made = stored(one)
    if not one.experts:
        yield one.name, made
        return
    for expert, weight in enumerate(made.unbind()):
        yield one.name.format(expert), weight


def stored(one: Named) -> torch.Tensor:
    """A tensor of a file as its converter found it: rows in order, norms without the 1 that was added."""
    rows, tensor = mapped(one.placed), one.placed.tensor
    if one.heads and len(tensor.shape) == 1:
        # A bias is one row, and its elements are in the order of the weight's rows.
        return _in_order(StoredTensor(rows, tensor.type, tensor.shape).values(), one.heads)
    if one.heads:
        rows = _in_order(rows, one.heads)
    shape = (1, *tensor.shape) if one.row and len(tensor.shape) == 1 else tensor.shape
    made = StoredTensor(rows, tensor.type, shape)
    return made.values().float() - 1 if one.plus_one else made


def _in_order(values: torch.Tensor, heads: int) -> torch.Tensor:
    """From (half, pair) back to (pair, half) within each head."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(values.shape)
