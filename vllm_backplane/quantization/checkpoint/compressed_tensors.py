"""compressed-tensors checkpoints through vLLM's own configuration class.

vLLM's class chooses the scheme of each layer, and the schemes ask for a kernel, which is ours. What no kernel of ours
can multiply is refused when the configuration is read, rather than in a worker.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding import (
    CompressedTensorsEmbeddingWNA16Int,
)

from vllm_backplane.quantization.checkpoint import mixed_precision
from vllm_backplane.quantization.checkpoint.experts import Layout, SchemeMoEMethod
from vllm_backplane.quantization.checkpoint.layer_loading import loaded_by_layer
from vllm_backplane.quantization.checkpoint.refusal import refused
from vllm_backplane.settings import compat

_PACKED, _PLAIN = "pack-quantized", "int-quantized"

_INT8 = Layout(
    bits=8,
    group=-1,
    codes="weight",
    scales="weight_scale",
    zeros="",
    has_zeros=False,
    output=0,
    packed=1,
    plain=True,
)


class BackplaneCompressedTensorsConfig(CompressedTensorsConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BackplaneCompressedTensorsConfig:
        try:
            made = super().from_config(config)
        except (ValueError, DeprecationWarning) as told:  # orders by activation, sparsity, and what is damaged
            raise refused(f"this compressed-tensors checkpoint ({told})") from told
        for target, scheme in made.target_scheme_map.items():
            if fault := _fault(scheme, scheme.get("format") or made.quant_format):
                raise refused(f"compressed-tensors for {target!r}: {fault}")
        if made.transform_config is not None:
            raise refused("compressed-tensors with transforms")
        return made

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA's; there is none here

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        mixed_precision.register()
        if isinstance(layer, RoutedExperts):
            return self._for_experts(layer, prefix)
        found = super().get_quant_method(layer, prefix)
        if isinstance(found, CompressedTensorsEmbeddingWNA16Int):
            raise refused(f"compressed-tensors for the embedding {prefix}")
        return BackplaneCompressedTensorsMethod(self) if type(found) is CompressedTensorsLinearMethod else found

    def _for_experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        self._add_fused_moe_to_target_scheme_map()
        first, *others = [self.get_scheme_dict(layer, f"{prefix}.0.{part}") for part in compat.expert_parts(layer)]
        if first is None and not any(others):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if first is None or any(other != first for other in others):
            raise refused(f"compressed-tensors for the experts of {prefix}, of several schemes")
        if first.get("input_activations") is not None:  # W8A8, or it would have been refused (_fault)
            return SchemeMoEMethod(layer.moe_config, prefix, _INT8)
        weights: Any = first["weights"]
        layout = Layout(
            bits=weights.num_bits,
            group=weights.group_size if _name(weights.strategy) == "group" else -1,
            codes="weight_packed",
            scales="weight_scale",
            zeros="weight_zero_point",
            has_zeros=not weights.symmetric,
            output=0,
            packed=1,
            beside=("weight_shape",),
        )
        return SchemeMoEMethod(layer.moe_config, prefix, layout)


@register_weight_loader_v2_supported_method
class BackplaneCompressedTensorsMethod(CompressedTensorsLinearMethod):
    uses_meta_device = True

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        # In float32, scales are what the checkpoint says, whatever --dtype is.
        with loaded_by_layer(layer, len(output_partition_sizes), self.quantization_config.packed_modules_mapping):
            super().create_weights(
                layer,
                input_size_per_partition,
                output_partition_sizes,
                input_size,
                output_size,
                torch.float32,
                **extra_weight_attrs,
            )
            if (shape := getattr(layer, "weight_shape", None)) is not None:
                # Nothing reads it. There is one of it for each part that is fused, and vLLM, which counts what is
                # loaded, would take the others for weights.
                shape.weight_loader_numel = 0
        layer.params_dtype = params_dtype  # type: ignore[assignment]


def _fault(scheme: dict[str, Any], layout: str | None) -> str | None:
    """Why the weights of a target cannot be served; None if they can."""
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    if scheme.get("output_activations"):
        return "quantized outputs"
    stated = f"{_name(weights.type)} weights of {weights.num_bits} bits by {_name(weights.strategy)}"
    if _name(weights.type) != "int" or weights.dynamic:
        return stated
    if inputs is None:
        served = layout == _PACKED and weights.num_bits in (4, 8) and _name(weights.strategy) in ("group", "channel")
        return None if served else f"{stated}, stored as {layout}"
    stated = f"{stated}, {_name(inputs.type)} inputs of {inputs.num_bits} bits by {_name(inputs.strategy)}"
    if not inputs.dynamic or not inputs.symmetric or _name(inputs.strategy) != "token":
        return f"{stated}, {'dynamic' if inputs.dynamic else 'static'}, symmetric: {inputs.symmetric}"
    served = (
        layout == _PLAIN
        and weights.num_bits == inputs.num_bits == 8
        and _name(inputs.type) == "int"
        and weights.symmetric
        and _name(weights.strategy) in ("channel", "tensor")
    )
    return None if served else f"{stated}, stored as {layout}, symmetric: {weights.symmetric}"


def _name(member: Any) -> str:
    return str(getattr(member, "value", member))
