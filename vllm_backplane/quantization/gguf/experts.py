"""Loads and computes the experts of a mixture with weights from a GGUF file.

Each expert is two linear layers on packed blocks, computed for the tokens that are routed to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from vllm_backplane import ops
from vllm_backplane.errors import CheckpointError
from vllm_backplane.quantization.gguf.linear import GgufLinearMethod
from vllm_backplane.quantization.gguf.packed_rows import (
    PackedRows,
    TypedRows,
    input_shard,
    install_packed_rows,
    require_lazy,
    shape_mismatch,
)
from vllm_backplane.quantization.packed_parameters import release_freed_memory
from vllm_backplane.quantization.per_expert_moe import PerExpertMoEMethod, run_experts

_PROJECTIONS = {"w1": ("up", 0), "w3": ("up", 1), "w2": ("down", 0)}
"""The linear layer of an expert that each of vLLM's weights belongs to, and the weight's place in it."""


class GgufMoEMethod(PerExpertMoEMethod):
    source = "GGUF files"

    def __init__(self, moe: FusedMoEConfig, prefix: str) -> None:
        super().__init__(moe, prefix)
        self._loaded: dict[tuple[int, str, int], TypedRows] = {}
        self._packed_rows: list[dict[str, list[PackedRows]]] = []

    def create_parameters(self, layer: Any) -> None:
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.weight_loader = partial(self._load, layer)

    def _load(
        self,
        layer: Any,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        tensor = require_lazy(loaded_weight, self._prefix)
        projection, place = _PROJECTIONS[shard_id]
        parallel, rows = layer.moe_config.moe_parallel_config, tensor.rows
        hidden, full = layer.hidden_size, self._intermediate * parallel.tp_size
        expected = (full, hidden) if projection == "up" else (hidden, full)
        if tensor.shape != expected:
            raise shape_mismatch(tensor, f"an expert of {self._prefix}", expected)
        if projection == "up":
            rows = rows[parallel.tp_rank * self._intermediate : (parallel.tp_rank + 1) * self._intermediate]
        elif parallel.tp_size > 1:
            rows = input_shard(tensor, rows, self._intermediate, parallel.tp_rank, self._prefix)
        self._loaded[expert_id, projection, place] = (tensor.kind, rows)
        if len(self._loaded) == len(_PROJECTIONS) * self._experts:
            self._pack(layer)
        return True if return_success else None

    def _pack(self, layer: Any) -> None:
        modules = torch.nn.ModuleList()
        for expert in range(self._experts):
            module, packed = torch.nn.ModuleDict({"up": torch.nn.Module(), "down": torch.nn.Module()}), {}
            for projection, places in (("up", 2), ("down", 1)):
                parts = [self._loaded.pop((expert, projection, place)) for place in range(places)]
                size = self._intermediate * 2 if projection == "up" else layer.hidden_size
                packed[projection] = install_packed_rows(module[projection], parts, self._dtype, self._device, size)
            modules.append(module)
            self._packed_rows.append(packed)
        layer.backplane_experts = modules
        self._clear_full_weights(layer)
        release_freed_memory()

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self._packed_rows:
            raise CheckpointError(f"the file has no weights, or not all, for {self._prefix}; choose a complete one")

    def experts(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        def linear(projection: str, expert: int, tokens: torch.Tensor) -> torch.Tensor:
            module, packed = layer.backplane_experts[expert][projection], self._packed_rows[expert][projection]
            return GgufLinearMethod.apply_packed_rows(module, packed, tokens, None)

        def up(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            return ops.silu_and_mul.call(linear("up", expert, tokens))

        return run_experts(x, weights, ids, self._experts, up, partial(linear, "down"))
