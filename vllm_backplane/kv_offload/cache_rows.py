"""Reads and writes the KV cache as rows of bytes: one row is one block of all layers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy
import torch

from vllm_backplane.errors import BackplaneError
from vllm_backplane.kv_offload.slots import Bytes


class CacheRows:
    """Reads and writes the KV cache tensors of one worker as rows. A row is the bytes of one block from every layer."""

    def __init__(self, caches: Iterable[torch.Tensor], blocks: int) -> None:
        distinct: dict[int, torch.Tensor] = {}  # layers may share a cache
        for cache in caches:
            distinct.setdefault(cache.data_ptr(), cache)
        self._layers = [_rows(cache, blocks) for cache in distinct.values()]
        self.layout = [f"{cache.dtype} {tuple(cache.shape[1:])} {cache.stride()[1:]}" for cache in distinct.values()]
        """The layout of a row. Rows with another layout cannot be exchanged."""
        self.row_bytes = sum(layer.shape[1] for layer in self._layers)

    def read(self, block_id: int) -> Bytes:
        row = torch.empty(self.row_bytes, dtype=torch.uint8)
        for part, layer in self._parts(row):
            part.copy_(layer[block_id])
        return row.numpy()

    def write(self, block_id: int, row: Bytes) -> None:
        for part, layer in self._parts(torch.from_numpy(row)):
            layer[block_id].copy_(part)

    def _parts(self, row: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each layer's part of a row, with the layer's cache."""
        start = 0
        for layer in self._layers:
            yield row[start : start + layer.shape[1]], layer
            start += layer.shape[1]


def _rows(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """Returns a view of a cache as (block, byte), for any order of dimensions inside a block. No bytes are moved."""
    strides = cache.stride()
    order = sorted(range(cache.dim()), key=lambda dim: (-strides[dim], -cache.shape[dim]))
    dense = cache.permute(order)
    if order[0] != 0 or cache.shape[0] != blocks or not dense[0].is_contiguous():
        raise BackplaneError(
            f"KV offload requires a KV cache in which each block is contiguous, but this one has shape "
            f"{tuple(cache.shape)} and strides {strides}; remove --kv-transfer-config"
        )
    inside = int(numpy.prod(dense.shape[1:]))
    flat = dense.as_strided((blocks, inside), (dense.stride(0), 1))
    return flat.view(torch.uint8)
