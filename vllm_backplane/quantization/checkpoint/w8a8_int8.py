"""Implements the linear kernel of compressed-tensors W8A8-int8: weights have a scale per output, inputs one per token.

The operator `quantized_linear` quantizes its inputs in this way if the weight has one group.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, Int8ScaledMMLinearLayerConfig

from vllm_backplane import ops
from vllm_backplane.ops.quantized_linear import Packed, empty_codes, packed_by_group, packed_codes, padded_size
from vllm_backplane.quantization.checkpoint.linear_method import replace_with_packed
from vllm_backplane.quantization.checkpoint.registration import require_usable_scales
from vllm_backplane.quantization.checkpoint.repacking import CHUNK, shortened_exactly
from vllm_backplane.runtime import runtime


class BackplaneInt8Kernel(Int8ScaledMMLinearKernel):
    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.is_static_input_scheme or not c.input_symmetric:
            return False, "inputs are quantized per token and symmetrically; use such a checkpoint (dynamic=true)"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight. vLLM calls it when the layer is complete, and again when all layers are loaded."""
        weight_name, scale_name = self.layer_param_names[:2]
        if getattr(layer, weight_name).dim() != 2:  # packed already
            return
        layer.backplane_rows = len(getattr(layer, weight_name))  # type: ignore[assignment]
        replace_with_packed(layer, (weight_name, scale_name), lambda: self._repack(layer))

    def _repack(self, layer: torch.nn.Module) -> Packed:
        """Returns the packed weight. No reference to the loaded tensors remains, so that they can be freed."""
        weight, scales = (getattr(layer, name).data for name in self.layer_param_names[:2])
        require_usable_scales(scales, str(getattr(layer, "prefix", "a layer")))
        if not self.config.is_channelwise:  # one scale for each fused weight
            scales = torch.cat(
                [one.expand(width) for one, width in zip(scales, layer.logical_widths, strict=True)]  # type: ignore[arg-type]
            )
        return pack_int8(weight, scales.reshape(-1, 1).float())

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.quantized_linear.call(x, layer.weight, layer.weight_scale, None, 8, layer.backplane_rows, bias)


def pack_int8(weight: torch.Tensor, scales: torch.Tensor, chunk: int = CHUNK) -> Packed:
    """Packs an int8 weight [features, inputs] with one scale per output, in chunks of about `chunk` weights.

    The code of zero is 128.
    """
    layout = runtime().device.quantized_layout(8)
    width = layout.width
    features, fan_in = weight.shape
    padded = padded_size(fan_in, 0)
    codes = empty_codes(features, padded, 8, layout, weight.device)
    at_once = max(chunk // (padded * width), 1) * width
    for first in range(0, features, at_once):
        part = weight[first : first + at_once].view(torch.uint8) ^ 128
        blocks = packed_codes(torch.nn.functional.pad(part, (0, padded - fan_in)), 8, layout)
        codes[first // width : first // width + len(blocks)] = blocks
    return Packed(codes, packed_by_group(shortened_exactly(scales), width), None)
