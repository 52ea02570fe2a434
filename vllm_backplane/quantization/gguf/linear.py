"""Linear layers with weights from a GGUF file.

What the file has for a layer is collected without being read; once all of a layer's parts are known, they are packed,
in pieces. So nothing is in memory twice but the piece at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear

from vllm_backplane import ops
from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf.lazy_tensor import StoredTensor
from vllm_backplane.layers.linear import BackplaneLinearMethod
from vllm_backplane.quantization.gguf.blocks import Rows, Run, all_floats, install, values
from vllm_backplane.quantization.online.linear import empty
from vllm_backplane.runtime import runtime

_QKV = {"q": 0, "k": 1, "v": 2}


class _ArrangedAtOnce(BackplaneLinearMethod):
    """Of values that are put into the device's order as soon as a layer has all of them, so that one layer at a time is
    in memory twice; vLLM does it when all are loaded."""

    def arrange(self, layer: torch.nn.Module) -> None:
        loaded = layer.get_parameter("weight")
        super().process_weights_after_loading(layer)
        if layer.weight is not loaded:
            empty(loaded)  # PyTorch's allocator may keep what is freed

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Done."""


class GgufLinearMethod(LinearMethodBase):
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._parts: dict[int, Rows] = {}
        self._runs: list[Run] = []

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_extra_weight_attrs: Any,
    ) -> None:
        self._fan_in, self._whole_fan_in = input_size_per_partition, input_size
        self._sizes, self._dtype = output_partition_sizes, params_dtype
        self._device = torch.empty(0).device
        weight = torch.nn.Parameter(
            torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype, device="meta"),
            requires_grad=False,
        )
        weight.weight_loader = partial(self._load, layer)  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)

    def _load(self, layer: Any, _parameter: torch.Tensor, loaded: torch.Tensor, shard: str | int | None = None) -> None:
        if not isinstance(loaded, StoredTensor):
            raise BackplaneError(
                f"this model takes the weights of {self._prefix} apart before they are loaded, which blocks of a GGUF "
                "file do not allow; use the model's original checkpoint"
            )
        whole = self._whole_sizes(layer)
        if shard is None and len(self._sizes) > 1:
            pieces = loaded.rows.split(whole) if len(loaded.rows) == sum(whole) else ()
            for number, piece in enumerate(pieces):
                self._take(layer, number, piece, loaded, whole)
            if not pieces:
                raise self._misfit(loaded, (sum(whole), self._whole_fan_in))
        else:
            number = 0 if shard is None else _QKV[shard] if isinstance(shard, str) else shard
            self._take(layer, number, loaded.rows, loaded, whole)
        if len(self._parts) == len(self._sizes):
            self._finish(layer)

    def _whole_sizes(self, layer: Any) -> list[int]:
        """Rows of each part in the file."""
        if isinstance(layer, QKVParallelLinear):
            return [
                layer.total_num_heads * layer.head_size,
                layer.total_num_kv_heads * layer.head_size,
                layer.total_num_kv_heads * layer.v_head_size,
            ]
        whole = isinstance(layer, (RowParallelLinear, ReplicatedLinear))  # a router is, and has a tp_size as well
        split = 1 if whole else getattr(layer, "tp_size", 1)
        return [size * split for size in self._sizes]

    def _take(self, layer: Any, number: int, rows: torch.Tensor, loaded: StoredTensor, whole: list[int]) -> None:
        """This worker's share of a part: rows, or columns where the layer is split along its input."""
        if loaded.dim() != 2 or rows.shape[0] != whole[number] or loaded.shape[1] != self._whole_fan_in:
            raise self._misfit(loaded, (whole[number], self._whole_fan_in))
        rank = getattr(layer, "tp_rank", 0)
        if self._fan_in != self._whole_fan_in:
            per_block, block_bytes = GGML_QUANT_SIZES[loaded.kind]
            if self._fan_in % per_block:
                raise CheckpointError(
                    f"{self._prefix} has {loaded.kind.name} blocks of {per_block}, and each worker's share would be "
                    f"{self._fan_in} inputs; choose another --tensor-parallel-size"
                )
            share = self._fan_in // per_block * block_bytes
            rows = rows[:, rank * share : (rank + 1) * share]
        elif self._sizes[number] != whole[number]:
            if number > 0 and isinstance(layer, QKVParallelLinear):
                rank //= layer.num_kv_head_replicas
            rows = rows[rank * self._sizes[number] : (rank + 1) * self._sizes[number]]
        self._parts[number] = (loaded.kind, rows)

    def _misfit(self, loaded: torch.Tensor, expected: tuple[int, int]) -> CheckpointError:
        return CheckpointError(
            f"the file has {tuple(loaded.shape)} weights for {self._prefix}, and its own metadata ask for {expected}; "
            "fetch it again, or make it anew with a current converter"
        )

    def _finish(self, layer: Any) -> None:
        parts = [self._parts[number] for number in range(len(self._sizes))]
        self._parts = {}
        if all_floats(parts):
            # As a checkpoint in full precision would have it; the rest is that method's.
            layer.weight = torch.nn.Parameter(values(parts, self._dtype).to(self._device), requires_grad=False)
            layer.quant_method = _ArrangedAtOnce()
            layer.quant_method.arrange(layer)
        else:
            self._runs = install(layer, parts, self._dtype, self._device, sum(self._sizes))
        # Freed memory between codes that stay would add up from layer to layer.
        runtime().device.empty_cache()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not self._runs:
            raise CheckpointError(f"the file has no weights, or not all, for {self._prefix}; choose a complete one")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.multiply(layer, self._runs, x, bias)

    @staticmethod
    def multiply(layer: Any, runs: Sequence[Run], x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One product for each run, side by side."""
        products, first = [], 0
        for run in runs:
            own = None if bias is None else bias[first : first + run.rows]
            first += run.rows
            weight = getattr(layer, run.name)
            if run.bits == 0:
                products.append(ops.linear.call(x, weight, own))
                continue
            scale, offset = getattr(layer, f"{run.name}_scale"), getattr(layer, f"{run.name}_offset")
            products.append(ops.quantized_linear.call(x, weight, scale, offset, run.bits, run.rows, own))
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)
