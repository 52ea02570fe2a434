"""Linear layers with quantized weights, on the operator `quantized_linear`.

vLLM offers loading by layers: a weight is created without memory, what the checkpoint has for it is collected, and
once all of a layer is there, memory is taken, filled and given to `process_weights_after_loading`. So of the
full-precision model only one layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.parameter import ModelWeightParameter

from vllm_backplane import ops
from vllm_backplane.device import host
from vllm_backplane.layers.deferred_weights import collect, insist_on_loaded
from vllm_backplane.layers.linear import refuse_loading
from vllm_backplane.ops.quantized_linear import Packed, packed
from vllm_backplane.quantization.online.formats import Format
from vllm_backplane.runtime import runtime

logger = init_logger("vllm." + __name__)


class QuantizedLinearMethod(LinearMethodBase):
    uses_meta_device = True

    def __init__(self, chosen: Format, prefix: str, fused: Mapping[str, list[str]]) -> None:
        """`fused` is that of `collect`."""
        self.format = chosen
        self._prefix = prefix
        self._fused = fused

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
        layer.backplane_rows = sum(output_partition_sizes)  # type: ignore[assignment]
        weight = ModelWeightParameter(
            data=torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        collect(layer, self._prefix, len(output_partition_sizes), self._fused)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called as soon as the layer is loaded, and by vLLM once more when all are."""
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        if hasattr(layer, "weight_scale") or weight.dim() != 2:  # a convolution kept as a linear layer has three
            return
        insist_on_loaded(layer, ("weight",))
        made = self.quantize(weight.data)
        empty(weight)
        install(layer, made)
        # Freed memory between codes that stay would add up from layer to layer.
        runtime().device.empty_cache()

    def quantize(self, weight: torch.Tensor, out_features: int | None = None) -> Packed:
        return quantized(self.format, weight, out_features)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.weight.dtype not in (torch.uint8, torch.int8):
            return ops.linear.call(x, layer.weight, bias)
        return ops.quantized_linear.call(
            x, layer.weight, layer.weight_scale, layer.weight_offset, self.format.bits, layer.backplane_rows, bias
        )


def quantized(chosen: Format, weight: torch.Tensor, out_features: int | None = None) -> Packed:
    layout = runtime().device.quantized_layout(chosen.bits)
    return packed(weight, chosen.bits, chosen.group, layout, symmetric=chosen.symmetric, out_features=out_features)


def empty(parameter: torch.Tensor) -> None:
    """Free the memory of a parameter that vLLM still refers to while its layer is loaded."""
    left = parameter.data.untyped_storage()
    parameter.data = parameter.data.new_empty(0)
    if parameter.is_cpu:
        host.forget(left)


def into_huge_pages(codes: torch.Tensor) -> None:
    """Of weights that were made without them, so that no more is taken than they need."""
    if codes.is_cpu and (reason := host.gather_pages(codes.untyped_storage())):
        logger.info_once("Packed weights stay in small pages, which are slower to read (%s).", reason)


def install(layer: torch.nn.Module, made: Packed, device: torch.device | None = None) -> None:
    """The codes take the weight's name: vLLM looks there for where a layer is (LoRA, for one)."""
    for name, tensor in named(made).items():
        parameter = torch.nn.Parameter(tensor.to(device or tensor.device), requires_grad=False)
        parameter.weight_loader = refuse_loading  # type: ignore[attr-defined]
        setattr(layer, name, parameter)
    if made.offsets is None:
        layer.register_parameter("weight_offset", None)


def named(made: Packed) -> dict[str, torch.Tensor]:
    found = {"weight": made.codes, "weight_scale": made.scales, "weight_offset": made.offsets}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
