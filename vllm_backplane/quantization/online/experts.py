"""Experts of a mixture with weights that are quantized while they are loaded, on the operator `quantized_linear`.

What the checkpoint has for an expert is collected, and quantized as soon as all of it is there. So of the
full-precision model one product of one expert is in memory at a time, where vLLM's loading by layers would have all
experts of a layer. The codes of all experts lie in one tensor.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing

from vllm_backplane import ops
from vllm_backplane.device import host
from vllm_backplane.errors import BackplaneError
from vllm_backplane.layers.linear import refuse_loading
from vllm_backplane.layers.moe import Activation, BackplaneFusedMoEMethod
from vllm_backplane.ops.moe import activated
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization.online.formats import Format
from vllm_backplane.quantization.online.linear import empty, into_huge_pages, named, quantized
from vllm_backplane.quantization.per_expert_linear import computed
from vllm_backplane.runtime import runtime

_PRODUCTS = ("w13", "w2")


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the checkpoint, and what vLLM's loader asks about it."""

    tensor: torch.Tensor
    name: str
    expert: int


class QuantizedMoEMethod(BackplaneFusedMoEMethod):
    one_operator = False
    uses_meta_device = True

    def __init__(self, moe: FusedMoEConfig, chosen: Format, prefix: str, must_be_loaded: bool) -> None:
        super().__init__(moe)
        self.format = chosen
        self._prefix = prefix
        self._must_be_loaded = must_be_loaded
        self._features: dict[str, int] = {}
        self._experts = 0
        self._waiting: dict[tuple[str, int], dict[str, _Part]] = {}
        self._made: dict[str, Packed] = {}
        self._quantized: set[tuple[str, int]] = set()

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        self._device = torch.empty(0).device
        if self.moe.has_bias:
            # A model that has them (GPT-OSS) copies all experts into place itself, past every loader.
            super().create_weights(layer, *args, **kwargs)
        else:
            with torch.device("meta"):
                super().create_weights(layer, *args, **kwargs)
        weights = {product: getattr(layer, f"{product}_weight") for product in _PRODUCTS}
        self._features = {product: weight.shape[1] for product, weight in weights.items()}
        self._experts = weights["w2"].shape[0]
        if self.moe.has_bias:
            return
        if not self._must_be_loaded:
            initialize_online_processing(layer)  # vLLM fills the layer with something, which is then quantized
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
        """Takes what comes for an expert, or as a tensor of three dimensions for all of this worker's."""
        layer: Any = self._layer()
        if not param.is_meta or get_layerwise_info(layer).kernel_tensors is not None:
            # Loaded again, in vLLM's way, which keeps the addresses of what is there.
            found: bool | None = layer.weight_loader(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success
            )
            return found
        if not layer.w13_weight.is_meta:
            refuse_loading()
        place = expert_id if layer.expert_map is None else int(layer.expert_map[expert_id])
        if place < 0:
            return False if return_success else None
        parts = {place: loaded_weight} if loaded_weight.dim() == 2 else dict(enumerate(loaded_weight.unbind()))
        for each, tensor in parts.items():
            self._take(layer, param, each, shard_id, _Part(tensor, weight_name, expert_id))
        return True if return_success else None

    def _take(self, layer: Any, param: torch.Tensor, place: int, shard: str, part: _Part) -> None:
        product = "w2" if shard == "w2" else "w13"
        waiting = self._waiting.setdefault((product, place), {})
        waiting[shard] = part
        if product == "w13" and self.moe.is_act_and_mul and len(waiting) < 2:
            return
        del self._waiting[product, place]
        # An allocator that asks for huge pages would take 2 MiB for the first byte between what is kept.
        with host.without_huge_pages():
            # vLLM's loader finds this worker's part and puts it in its place. What pads a weight stays zero.
            whole = torch.zeros((1, *param.shape[1:]), dtype=param.dtype, device=self._device)
            for name, one in waiting.items():
                layer.weight_loader(whole, one.tensor.unsqueeze(0), one.name, name, one.expert)
            self._keep(product, place, quantized(self.format, whole[0]))
            empty(whole)
        if len(self._quantized) == len(_PRODUCTS) * self._experts:
            self._install(layer)

    def _keep(self, product: str, place: int, made: Packed) -> None:
        kept = self._made.get(product)
        if kept is None:
            codes, scales, offsets = made
            kept = Packed(
                codes.new_empty(self._experts, *codes.shape),
                scales.new_empty(self._experts, *scales.shape),
                None if offsets is None else offsets.new_empty(self._experts, *offsets.shape),
            )
        elif made.scales.dtype == torch.float32 != kept.scales.dtype:  # an expert of unusual size
            kept = Packed(kept.codes, kept.scales.float(), None if kept.offsets is None else kept.offsets.float())
        self._made[product] = kept
        for all_experts, one in zip(kept, made, strict=True):
            if all_experts is not None and one is not None:
                all_experts[place] = one
                empty(one)
        self._quantized.add((product, place))

    def _install(self, layer: Any) -> None:
        for product in _PRODUCTS:
            made = self._made.pop(product)
            for name, tensor in named(made).items():
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                parameter.weight_loader = refuse_loading  # type: ignore[attr-defined]
                setattr(layer, f"{product}_{name}", parameter)
            into_huge_pages(made.codes)
            if made.offsets is None:
                layer.register_parameter(f"{product}_weight_offset", None)
        self._quantized.clear()
        # Freed memory between codes that stay would add up from layer to layer.
        runtime().device.empty_cache()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called by vLLM when all is loaded, and where it has a whole layer in memory: of dummy weights, with biases,
        and when weights are loaded again."""
        if not layer.w13_weight.is_floating_point():
            return
        if layer.w13_weight.is_meta:
            wanted = {(product, place) for product in _PRODUCTS for place in range(self._experts)}
            missing = sorted({place for _product, place in wanted - self._quantized})
            raise BackplaneError(
                f"the checkpoint has no weights, or not all, for experts {missing[:4]} of {self._prefix}; choose a "
                "complete one, or remove --quantization if this model loads its experts in a way of its own"
            )
        for product in _PRODUCTS:
            weight = getattr(layer, f"{product}_weight")
            with host.without_huge_pages():
                for place in range(self._experts):
                    self._keep(product, place, quantized(self.format, weight.data[place]))
            empty(weight)
        self._install(layer)

    def experts(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        def multiplied(product: str, expert: int, tokens: torch.Tensor) -> torch.Tensor:
            codes, scales, offsets = (
                getattr(layer, f"{product}_{name}") for name in ("weight", "weight_scale", "weight_offset")
            )
            return ops.quantized_linear.call(
                tokens,
                codes[expert],
                scales[expert],
                None if offsets is None else offsets[expert],
                self.format.bits,
                self._features[product],
                getattr(layer, f"{product}_bias")[expert] if self.moe.has_bias else None,
            )

        def up(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            projected, kind = multiplied("w13", expert, tokens), self._activation
            if kind == Activation("silu"):
                return ops.silu_and_mul.call(projected)
            return activated(kind.name, projected, kind.alpha, kind.limit, kind.beta)

        def down(expert: int, tokens: torch.Tensor) -> torch.Tensor:
            return multiplied("w2", expert, tokens)

        if layer.expert_map is not None:
            ids = torch.where(ids >= 0, layer.expert_map[ids.long().clamp(min=0)], -1)
        return computed(x, weights, ids, self._experts, up, down, weigh_inputs=layer.apply_router_weight_on_input)
