"""Loads compressed-tensors checkpoints through subclasses of vLLM's configuration and linear method.

vLLM's class chooses the scheme of each layer, and the scheme selects a kernel from vLLM's registry, which is
Backplane's. Schemes without such a kernel are refused when the configuration is read, before a worker starts.
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

from vllm_backplane.guards import guarded
from vllm_backplane.quantization.base import AnyDeviceConfig, LinearWeights
from vllm_backplane.quantization.checkpoint import mixed_precision
from vllm_backplane.quantization.checkpoint.experts import CheckpointMoEMethod, ExpertFormat
from vllm_backplane.quantization.checkpoint.linear_method import CheckpointLinearMethod
from vllm_backplane.quantization.checkpoint.registration import names_config_faults, unsupported
from vllm_backplane.settings import compat

_PACK_QUANTIZED, _INT_QUANTIZED = "pack-quantized", "int-quantized"

_W8A8_EXPERTS = ExpertFormat(
    bits=8,
    group=-1,
    codes="weight",
    scales="weight_scale",
    zero_points="",
    has_zero_points=False,
    output_dim=0,
    packed_dim=1,
    is_w8a8=True,
)


@guarded(
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig._add_fused_moe_to_target_scheme_map",
    why="the schemes of experts are read from its table",
    feature="compressed-tensors",
)
class BackplaneCompressedTensorsConfig(AnyDeviceConfig, CompressedTensorsConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BackplaneCompressedTensorsConfig:
        try:
            parsed = super().from_config(config)
        except (ValueError, DeprecationWarning) as error:  # activation order, sparsity, or a damaged configuration
            raise unsupported(f"this compressed-tensors checkpoint ({error})") from error
        for target, scheme in parsed.target_scheme_map.items():
            if reason := _unsupported_scheme(scheme, scheme.get("format") or parsed.quant_format):
                raise unsupported(f"compressed-tensors for {target!r}: {reason}")
        if parsed.transform_config is not None:
            raise unsupported("compressed-tensors with transforms")
        return parsed

    @names_config_faults
    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        mixed_precision.register()
        if isinstance(layer, RoutedExperts):
            return self._expert_method(layer, prefix)
        method = super().get_quant_method(layer, prefix)
        if isinstance(method, CompressedTensorsEmbeddingWNA16Int):
            raise unsupported(f"compressed-tensors for the embedding {prefix}")
        return BackplaneCompressedTensorsMethod(self) if type(method) is CompressedTensorsLinearMethod else method

    def _expert_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        self._add_fused_moe_to_target_scheme_map()
        names = compat.expert_weight_names(layer)
        first, *others = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
        if first is None and not any(others):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if first is None or any(other != first for other in others):
            raise unsupported(f"compressed-tensors with several schemes for the experts of {prefix}")
        if first.get("input_activations") is not None:  # W8A8: `from_config` refuses others
            return CheckpointMoEMethod(layer.moe_config, prefix, _W8A8_EXPERTS)
        weights: Any = first["weights"]
        expert_format = ExpertFormat(
            bits=weights.num_bits,
            group=weights.group_size if _name(weights.strategy) == "group" else -1,
            codes="weight_packed",
            scales="weight_scale",
            zero_points="weight_zero_point",
            has_zero_points=not weights.symmetric,
            output_dim=0,
            packed_dim=1,
            ignored=("weight_shape",),
        )
        return CheckpointMoEMethod(layer.moe_config, prefix, expert_format)


@register_weight_loader_v2_supported_method
class BackplaneCompressedTensorsMethod(CheckpointLinearMethod, CompressedTensorsLinearMethod):
    any_integers = ("weight_shape",)

    def __init__(self, quant_config: BackplaneCompressedTensorsConfig) -> None:
        super().__init__(quant_config)
        self.quant_config = quant_config

    def extend_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        if (shape := getattr(layer, "weight_shape", None)) is not None:
            # The checkpoint has a shape for each fused weight, and the layer has one parameter for it. vLLM counts the
            # elements that are loaded, and would mistake the further shapes for weights. Nothing reads the parameter.
            shape.weight_loader_numel = 0
        layer.params_dtype = weights.params_dtype  # type: ignore[assignment]


def _unsupported_scheme(scheme: dict[str, Any], layout: str | None) -> str | None:
    """Returns why a scheme is not supported, or None if it is."""
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    if scheme.get("output_activations"):
        return "quantized outputs"
    described = f"{_name(weights.type)} weights of {weights.num_bits} bits by {_name(weights.strategy)}"
    if _name(weights.type) != "int" or weights.dynamic:
        return described
    if inputs is None:
        supported = (
            layout == _PACK_QUANTIZED and weights.num_bits in (4, 8) and _name(weights.strategy) in ("group", "channel")
        )
        return None if supported else f"{described}, stored as {layout}"
    described = f"{described}, {_name(inputs.type)} inputs of {inputs.num_bits} bits by {_name(inputs.strategy)}"
    if not inputs.dynamic or not inputs.symmetric or _name(inputs.strategy) != "token":
        return f"{described}, {'dynamic' if inputs.dynamic else 'static'}, symmetric: {inputs.symmetric}"
    supported = (
        layout == _INT_QUANTIZED
        and weights.num_bits == inputs.num_bits == 8
        and _name(inputs.type) == "int"
        and weights.symmetric
        and _name(weights.strategy) in ("channel", "tensor")
    )
    return None if supported else f"{described}, stored as {layout}, symmetric: {weights.symmetric}"


def _name(member: Any) -> str:
    return str(getattr(member, "value", member))
