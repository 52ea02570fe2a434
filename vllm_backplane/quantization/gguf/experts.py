"""Experts of a mixture with weights from a GGUF file.

Each expert is two products on blocks, of the tokens that were routed to it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from vllm_backplane import ops
from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf.lazy_tensor import StoredTensor
from vllm_backplane.layers.moe import BackplaneFusedMoEMethod
from vllm_backplane.quantization.gguf.blocks import Rows, Run, install
from vllm_backplane.quantization.gguf.linear import GgufLinearMethod
from vllm_backplane.quantization.per_expert_linear import computed
from vllm_backplane.runtime import runtime

_INTO = {"w1": ("up", 0), "w3": ("up", 1), "w2": ("down", 0)}
"""Which product of an expert a weight belongs to, and its place there."""


class GgufMoEMethod(BackplaneFusedMoEMethod):
    one_operator = False

    def __init__(self, moe: FusedMoEConfig, prefix: str) -> None:
        super().__init__(moe)
        if moe.activation is not MoEActivation.SILU or moe.has_bias:
            raise BackplaneError(
                f"the experts of {prefix} have biases or the activation {moe.activation.value!r}; from GGUF, experts "
                "with SiLU and no bias are served: use the model's original checkpoint"
            )
        self._prefix = prefix
        self._parts: dict[tuple[int, str, int], Rows] = {}
        self._runs: list[dict[str, list[Run]]] = []

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        if layer.expert_map is not None:
            raise BackplaneError("experts from GGUF are not spread over workers; remove --enable-expert-parallel")
        if layer.apply_router_weight_on_input:
            raise BackplaneError(f"{self._prefix} weighs the inputs of experts, which is not served from GGUF")
        self._device = torch.empty(0).device
        self._dtype = kwargs["params_dtype"]
        self._experts, self._width = kwargs["num_experts"], kwargs["intermediate_size_per_partition"]
        with torch.device("meta"):
            super().create_weights(layer, *args, **kwargs)
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
        if not isinstance(loaded_weight, StoredTensor):
            raise BackplaneError(
                f"this model takes the weights of {self._prefix} apart before they are loaded, which blocks of a GGUF "
                "file do not allow; use the model's original checkpoint"
            )
        product, place = _INTO[shard_id]
        split, rows = layer.moe_config.moe_parallel_config, loaded_weight.rows
        hidden, whole = layer.hidden_size, self._width * split.tp_size
        expected = (whole, hidden) if product == "up" else (hidden, whole)
        if loaded_weight.shape != expected:
            raise CheckpointError(
                f"the file has {tuple(loaded_weight.shape)} weights for an expert of {self._prefix}, and its own "
                f"metadata ask for {expected}; fetch it again, or make it anew with a current converter"
            )
        if product == "up":
            rows = rows[split.tp_rank * self._width : (split.tp_rank + 1) * self._width]
        elif split.tp_size > 1:
            per_block, block_bytes = GGML_QUANT_SIZES[loaded_weight.kind]
            if self._width % per_block:
                raise CheckpointError(
                    f"{self._prefix} has {loaded_weight.kind.name} blocks of {per_block}, and each worker's share "
                    f"would be {self._width} inputs; choose another --tensor-parallel-size"
                )
            share = self._width // per_block * block_bytes
            rows = rows[:, split.tp_rank * share : (split.tp_rank + 1) * share]
        self._parts[expert_id, product, place] = (loaded_weight.kind, rows)
        if len(self._parts) == 3 * self._experts:
            self._finish(layer)
        return True if return_success else None

    def _finish(self, layer: Any) -> None:
        holders = torch.nn.ModuleList()
        for expert in range(self._experts):
            holder, runs = torch.nn.ModuleDict({"up": torch.nn.Module(), "down": torch.nn.Module()}), {}
            for product, places in (("up", 2), ("down", 1)):
                parts = [self._parts.pop((expert, product, place)) for place in range(places)]
                size = self._width * 2 if product == "up" else layer.hidden_size
                runs[product] = install(holder[product], parts, self._dtype, self._device, size)
            holders.append(holder)
            self._runs.append(runs)
        layer.backplane_experts = holders
        for name in ("w13_weight", "w2_weight"):
            setattr(layer, name, torch.nn.Parameter(torch.empty(0, device=self._device), requires_grad=False))
        runtime().device.empty_cache()

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self._runs:
            raise CheckpointError(f"the file has no weights, or not all, for {self._prefix}; choose a complete one")

    def experts(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        def product(name: str, expert: int, tokens: torch.Tensor) -> torch.Tensor:
            return GgufLinearMethod.multiply(
                layer.backplane_experts[expert][name], self._runs[expert][name], tokens, None
            )

        def up(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            return ops.silu_and_mul.call(product("up", expert, tokens))

        return computed(x, weights, ids, self._experts, up, partial(product, "down"))
