"""The KV cache as rows of bytes: one row holds a block's part of every layer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy
import torch

from vllm_backplane.errors import BackplaneError
from vllm_backplane.kv_offload.slots import Bytes


class Pages:
    def __init__(self, caches: Iterable[torch.Tensor], blocks: int) -> None:
        found: dict[int, torch.Tensor] = {}  # layers may share a cache
        for cache in caches:
            found.setdefault(cache.data_ptr(), cache)
        self._layers = [_rows(cache, blocks) for cache in found.values()]
        self.layout = [f"{cache.dtype} {tuple(cache.shape[1:])} {cache.stride()[1:]}" for cache in found.values()]
        """How a row is to be read: rows of another layout mean something else."""
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
        place = 0
        for layer in self._layers:
            yield row[place : place + layer.shape[1]], layer
            place += layer.shape[1]


def _rows(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """A cache as (block, byte), whatever order its layout has inside a block; no bytes are moved."""
    strides = cache.stride()
    order = sorted(range(cache.dim()), key=lambda dim: (-strides[dim], -cache.shape[dim]))
    dense = cache.permute(order)
    if order[0] != 0 or cache.shape[0] != blocks or not dense[0].is_contiguous():
        raise BackplaneError(
            f"a KV cache of shape {tuple(cache.shape)} and strides {strides} does not lie block by block, so "
            "the second tier cannot keep its blocks; remove --kv-transfer-config"
        )
    inside = int(numpy.prod(dense.shape[1:]))
    flat = dense.as_strided((blocks, inside), (dense.stride(0), 1))
    return flat.view(torch.uint8)
