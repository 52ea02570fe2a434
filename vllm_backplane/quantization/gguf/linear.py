"""Loads and computes linear layers with weights from a GGUF file.

The tensors of a layer are views of the mapped file until all of them have arrived. They are then packed in chunks, so
only one chunk is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear

from vllm_backplane import ops
from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.lazy_tensor import LazyTensor
from vllm_backplane.layers.layerwise_loading import QKV_SHARDS
from vllm_backplane.layers.linear import BackplaneLinearMethod
from vllm_backplane.quantization.base import LinearQuantizationMethod, LinearWeights
from vllm_backplane.quantization.gguf.packed_rows import (
    PackedRows,
    TypedRows,
    all_floats,
    float_values,
    input_shard,
    install_packed_rows,
    require_lazy,
    shape_mismatch,
)
from vllm_backplane.quantization.packed_parameters import free_storage, release_freed_memory


class _EagerlyArrangedMethod(BackplaneLinearMethod):
    """Rearranges the weight of an unquantized layer as soon as the layer is loaded.

    vLLM would rearrange all layers after the last one is loaded. Here one layer at a time is in memory twice.
    """

    def arrange(self, layer: torch.nn.Module) -> None:
        loaded = layer.get_parameter("weight")
        super().process_weights_after_loading(layer)
        if layer.weight is not loaded:
            free_storage(loaded)  # PyTorch's allocator may keep memory that is only freed

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing: `arrange` was called when the layer was loaded."""


class GgufLinearMethod(LinearQuantizationMethod, LinearMethodBase):
    """Loads the weights of one linear layer from a GGUF file, packs them, and computes the layer."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._loaded: dict[int, TypedRows] = {}
        self._packed_rows: list[PackedRows] = []

    def create_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        # Without the attributes: the weight loader among them refers to the layer, which would become a cycle.
        self._weights = replace(weights, extra_attributes={})
        self._device = torch.empty(0).device
        weight = torch.nn.Parameter(weights.meta_weight(), requires_grad=False)
        weight.weight_loader = partial(self._load, layer)  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)

    def _load(self, layer: Any, _parameter: torch.Tensor, loaded: torch.Tensor, shard: str | int | None = None) -> None:
        tensor = require_lazy(loaded, self._prefix)
        shards = len(self._weights.output_partition_sizes)
        full_sizes = self._full_output_sizes(layer)
        if shard is None and shards > 1:
            if len(tensor.rows) != sum(full_sizes):
                raise shape_mismatch(tensor, self._prefix, (sum(full_sizes), self._weights.input_size))
            for number, rows in enumerate(tensor.rows.split(full_sizes)):
                self._add(layer, number, rows, tensor, full_sizes)
        else:
            number = 0 if shard is None else QKV_SHARDS[shard] if isinstance(shard, str) else shard
            self._add(layer, number, tensor.rows, tensor, full_sizes)
        if len(self._loaded) == shards:
            self._pack(layer)

    def _full_output_sizes(self, layer: Any) -> list[int]:
        """Returns the rows of each fused weight in the file, before they are divided among ranks."""
        if isinstance(layer, QKVParallelLinear):
            return [
                layer.total_num_heads * layer.head_size,
                layer.total_num_kv_heads * layer.head_size,
                layer.total_num_kv_heads * layer.v_head_size,
            ]
        # A replicated layer, such as a router, has a tp_size too.
        is_whole = isinstance(layer, (RowParallelLinear, ReplicatedLinear))
        ranks = 1 if is_whole else getattr(layer, "tp_size", 1)
        return [size * ranks for size in self._weights.output_partition_sizes]

    def _add(self, layer: Any, number: int, rows: torch.Tensor, tensor: LazyTensor, full_sizes: Sequence[int]) -> None:
        """Adds this rank's part of a fused weight: some rows, or some columns if the inputs are divided."""
        weights, full_size = self._weights, full_sizes[number]
        if tensor.dim() != 2 or rows.shape[0] != full_size or tensor.shape[1] != weights.input_size:
            raise shape_mismatch(tensor, self._prefix, (full_size, weights.input_size))
        rank, size = getattr(layer, "tp_rank", 0), weights.output_partition_sizes[number]
        if weights.is_row_parallel:
            rows = input_shard(tensor, rows, weights.input_size_per_partition, rank, self._prefix)
        elif size != full_size:
            if number > 0 and isinstance(layer, QKVParallelLinear):
                rank //= layer.num_kv_head_replicas
            rows = rows[rank * size : (rank + 1) * size]
        self._loaded[number] = (tensor.kind, rows)

    def _pack(self, layer: Any) -> None:
        weights = self._weights
        parts = [self._loaded[number] for number in range(len(weights.output_partition_sizes))]
        self._loaded = {}
        if all_floats(parts):
            # The layer is as in a full-precision checkpoint, and the unquantized method computes it.
            values = float_values(parts, weights.params_dtype).to(self._device)
            layer.weight = torch.nn.Parameter(values, requires_grad=False)
            layer.quant_method = _EagerlyArrangedMethod()
            layer.quant_method.arrange(layer)
        else:
            self._packed_rows = install_packed_rows(
                layer, parts, weights.params_dtype, self._device, weights.output_size_per_partition
            )
        release_freed_memory()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not self._packed_rows:
            raise CheckpointError(f"the file has no weights, or not all, for {self._prefix}; choose a complete one")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.apply_packed_rows(layer, self._packed_rows, x, bias)

    @staticmethod
    def apply_packed_rows(
        layer: Any, packed: Sequence[PackedRows], x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the outputs of all rows of a layer, computed one GGUF type after another and concatenated."""
        outputs, first = [], 0
        for part in packed:
            part_bias = None if bias is None else bias[first : first + part.rows]
            first += part.rows
            weight = getattr(layer, part.name)
            if part.bits == 0:
                outputs.append(ops.linear.call(x, weight, part_bias))
                continue
            scale, offset = getattr(layer, f"{part.name}_scale"), getattr(layer, f"{part.name}_offset")
            outputs.append(ops.quantized_linear.call(x, weight, scale, offset, part.bits, part.rows, part_bias))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
