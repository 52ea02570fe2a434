"""Quantizes the experts of a mixture while they are loaded, and computes them with the operator `quantized_linear`.

An expert's weight is quantized as soon as all of its tensors have arrived. One weight of one expert is therefore in
memory in full precision at a time; vLLM's layerwise loading would hold all experts of a layer. The codes of all experts
are in one tensor.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing

from vllm_backplane import ops
from vllm_backplane.errors import BackplaneError
from vllm_backplane.host import host_memory
from vllm_backplane.layers.linear import refuse_loading
from vllm_backplane.layers.moe import Activation, BackplaneFusedMoEMethod
from vllm_backplane.ops.moe import apply_activation
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization.online.formats import Format
from vllm_backplane.quantization.online.linear import quantize
from vllm_backplane.quantization.packed_parameters import (
    free_storage,
    install_packed,
    move_to_huge_pages,
    release_freed_memory,
)
from vllm_backplane.quantization.per_expert_moe import run_experts

_PROJECTIONS = ("w13", "w2")


@dataclass(frozen=True, slots=True)
class _LoadedTensor:
    """Holds a tensor of the checkpoint, with the arguments that vLLM's weight loader needs for it."""

    tensor: torch.Tensor
    name: str
    expert: int


class OnlineMoEMethod(BackplaneFusedMoEMethod):
    uses_fused_operator = False
    uses_meta_device = True

    def __init__(self, moe: FusedMoEConfig, weight_format: Format, prefix: str, must_be_loaded: bool) -> None:
        super().__init__(moe)
        self.format = weight_format
        self._prefix = prefix
        self._must_be_loaded = must_be_loaded
        self._features: dict[str, int] = {}
        self._experts = 0
        self._incomplete: dict[tuple[str, int], dict[str, _LoadedTensor]] = {}
        self._packed: dict[str, Packed] = {}
        self._quantized: set[tuple[str, int]] = set()

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self._device = torch.empty(0).device
        if self.moe.has_bias:
            # Models with biases (GPT-OSS) copy all experts into the parameters themselves, without a weight loader.
            super().create_weights(layer, *args, **kwargs)
        else:
            with torch.device("meta"):
                super().create_weights(layer, *args, **kwargs)
        weights = {projection: getattr(layer, f"{projection}_weight") for projection in _PROJECTIONS}
        self._features = {projection: weight.shape[1] for projection, weight in weights.items()}
        self._experts = weights["w2"].shape[0]
        if self.moe.has_bias:
            return
        if not self._must_be_loaded:
            initialize_online_processing(layer)  # vLLM fills the layer with dummy weights, which are then quantized
            return
        self._layer = weakref.ref(layer)
        for weight in weights.values():
            weight.weight_loader = self.load

    def load(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Loads a tensor of one expert, or a tensor of three dimensions with all experts of this worker."""
        layer: Any = self._layer()
        if not param.is_meta or get_layerwise_info(layer).kernel_tensors is not None:
            # A reload: vLLM's layerwise loading keeps the addresses of the parameters.
            found: bool | None = layer.weight_loader(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success
            )
            return found
        if not layer.w13_weight.is_meta:
            refuse_loading()
        local = expert_id if layer.expert_map is None else int(layer.expert_map[expert_id])
        if local < 0:
            return False if return_success else None
        by_expert = {local: loaded_weight} if loaded_weight.dim() == 2 else dict(enumerate(loaded_weight.unbind()))
        for expert, tensor in by_expert.items():
            self._add(layer, param, expert, shard_id, _LoadedTensor(tensor, weight_name, expert_id))
        return True if return_success else None

    def _add(self, layer: Any, param: torch.Tensor, expert: int, shard: str, loaded: _LoadedTensor) -> None:
        """Adds a tensor to a local expert, and quantizes the expert's weight if it is complete."""
        projection = "w2" if shard == "w2" else "w13"
        tensors = self._incomplete.setdefault((projection, expert), {})
        tensors[shard] = loaded
        if projection == "w13" and self.moe.is_act_and_mul and len(tensors) < 2:
            return
        del self._incomplete[projection, expert]
        # An allocator that requests huge pages would take 2 MiB for the first byte between the packed weights.
        with host_memory.without_huge_pages():
            # vLLM's loader selects this worker's part and copies it. The padding of a weight stays zero.
            whole = torch.zeros((1, *param.shape[1:]), dtype=param.dtype, device=self._device)
            for name, one in tensors.items():
                layer.weight_loader(whole, one.tensor.unsqueeze(0), one.name, name, one.expert)
            self._store(projection, expert, quantize(self.format, whole[0]))
            free_storage(whole)
        if len(self._quantized) == len(_PROJECTIONS) * self._experts:
            self._install(layer)

    def _store(self, projection: str, expert: int, quantized: Packed) -> None:
        """Copies one expert's packed weight into the tensors of all experts."""
        stored = self._packed.get(projection)
        if stored is None:
            codes, scales, offsets = quantized
            stored = Packed(
                codes.new_empty(self._experts, *codes.shape),
                scales.new_empty(self._experts, *scales.shape),
                None if offsets is None else offsets.new_empty(self._experts, *offsets.shape),
            )
        elif quantized.scales.dtype == torch.float32 != stored.scales.dtype:  # scales outside of float16's range
            stored = Packed(
                stored.codes, stored.scales.float(), None if stored.offsets is None else stored.offsets.float()
            )
        self._packed[projection] = stored
        for all_experts, one in zip(stored, quantized, strict=True):
            if all_experts is not None and one is not None:
                all_experts[expert] = one
                free_storage(one)
        self._quantized.add((projection, expert))

    def _install(self, layer: Any) -> None:
        for projection in _PROJECTIONS:
            packed = self._packed.pop(projection)
            install_packed(layer, packed, f"{projection}_weight")
            move_to_huge_pages(packed.codes)
        self._quantized.clear()
        release_freed_memory()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks that all experts were loaded, or quantizes a layer that vLLM has filled as a whole.

        vLLM fills a whole layer with dummy weights, if the experts have biases, and when weights are reloaded.
        """
        if not layer.w13_weight.is_floating_point():
            return
        if layer.w13_weight.is_meta:
            needed = {(projection, expert) for projection in _PROJECTIONS for expert in range(self._experts)}
            missing = sorted({expert for _projection, expert in needed - self._quantized})
            raise BackplaneError(
                f"the checkpoint has no weights, or not all, for experts {missing[:4]} of {self._prefix}; choose a "
                "complete one, or remove --quantization if this model does not load experts through vLLM's loader"
            )
        for projection in _PROJECTIONS:
            weight = getattr(layer, f"{projection}_weight")
            with host_memory.without_huge_pages():
                for expert in range(self._experts):
                    self._store(projection, expert, quantize(self.format, weight.data[expert]))
            free_storage(weight)
        self._install(layer)

    def experts(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        def linear(projection: str, expert: int, tokens: torch.Tensor) -> torch.Tensor:
            codes, scales, offsets = (
                getattr(layer, f"{projection}_{name}") for name in ("weight", "weight_scale", "weight_offset")
            )
            return ops.quantized_linear.call(
                tokens,
                codes[expert],
                scales[expert],
                None if offsets is None else offsets[expert],
                self.format.bits,
                self._features[projection],
                getattr(layer, f"{projection}_bias")[expert] if self.moe.has_bias else None,
            )

        def up(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            projected, kind = linear("w13", expert, tokens), self._activation
            if kind == Activation("silu"):
                return ops.silu_and_mul.call(projected)
            return apply_activation(kind.name, projected, kind.alpha, kind.limit, kind.beta)

        def down(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            return linear("w2", expert, tokens)

        if layer.expert_map is not None:
            ids = torch.where(ids >= 0, layer.expert_map[ids.long().clamp(min=0)], -1)
        return run_experts(x, weights, ids, self._experts, up, down, weigh_inputs=layer.apply_router_weight_on_input)
