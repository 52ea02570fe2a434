"""Quantizes linear layers while they are loaded, and computes them with the operator `quantized_linear`.

vLLM's layerwise loading creates a weight without memory and buffers the checkpoint's tensors for it. When a layer is
complete, vLLM allocates and fills its weights and calls `process_weights_after_loading`. One layer of the
full-precision model is therefore in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.parameter import ModelWeightParameter

from vllm_backplane import ops
from vllm_backplane.layers.layerwise_loading import defer_loading, require_loaded
from vllm_backplane.ops.quantized_linear import Packed, packed
from vllm_backplane.quantization.base import LinearQuantizationMethod, LinearWeights
from vllm_backplane.quantization.online.formats import Format
from vllm_backplane.quantization.packed_parameters import free_storage, install_packed, release_freed_memory
from vllm_backplane.runtime import runtime


class OnlineLinearMethod(LinearQuantizationMethod, LinearMethodBase):
    uses_meta_device = True

    def __init__(self, weight_format: Format, prefix: str, packed_modules: Mapping[str, list[str]]) -> None:
        """`packed_modules` is vLLM's packed_modules_mapping (see `defer_loading`)."""
        self.format = weight_format
        self._prefix = prefix
        self._packed_modules = packed_modules

    def create_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        layer.backplane_rows = weights.output_size_per_partition  # type: ignore[assignment]
        weight = ModelWeightParameter(
            data=weights.meta_weight(),
            input_dim=1,
            output_dim=0,
            weight_loader=weights.extra_attributes["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        defer_loading(layer, self._prefix, len(weights.output_partition_sizes), self._packed_modules)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantizes the weight. vLLM calls it when the layer is complete, and again when all layers are loaded."""
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        if hasattr(layer, "weight_scale") or weight.dim() != 2:  # a convolution stored as a linear layer has three
            return
        require_loaded(layer, ("weight",))
        quantized = quantize(self.format, weight.data)
        free_storage(weight)
        install_packed(layer, quantized)
        release_freed_memory()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.weight.dtype not in (torch.uint8, torch.int8):
            return ops.linear.call(x, layer.weight, bias)
        return ops.quantized_linear.call(
            x, layer.weight, layer.weight_scale, layer.weight_offset, self.format.bits, layer.backplane_rows, bias
        )


def quantize(weight_format: Format, weight: torch.Tensor, out_features: int | None = None) -> Packed:
    """Returns a weight in the device's packed layout. Outputs beyond its rows, up to `out_features`, are zero."""
    layout = runtime().device.quantized_layout(weight_format.bits)
    return packed(
        weight,
        weight_format.bits,
        weight_format.group,
        layout,
        symmetric=weight_format.symmetric,
        out_features=out_features,
    )
