"""The product of compressed-tensors' W8A8-int8: weights and inputs of 8 bits, one scale per output and per token.

The operator rounds its input so by itself: one scale per row where the weight has one group.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, Int8ScaledMMLinearLayerConfig

from vllm_backplane import ops
from vllm_backplane.ops.quantized_linear import Packed, empty_codes, packed_by_group, packed_codes, padded_size
from vllm_backplane.quantization.checkpoint.layer_loading import exchange
from vllm_backplane.quantization.checkpoint.repacking import PIECE, exact
from vllm_backplane.runtime import runtime


class BackplaneInt8Kernel(Int8ScaledMMLinearKernel):
    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.is_static_input_scheme or not c.input_symmetric:
            return False, "inputs are quantized per token, symmetrically; use a checkpoint made so (dynamic=true)"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called as soon as the layer is loaded, and by vLLM once more when all are."""
        weight_name, scale_name = self.layer_param_names[:2]
        if getattr(layer, weight_name).dim() != 2:  # in the order of the operator already
            return
        layer.backplane_rows = len(getattr(layer, weight_name))  # type: ignore[assignment]
        exchange(layer, (weight_name, scale_name), lambda: self._repack(layer))

    def _repack(self, layer: torch.nn.Module) -> Packed:
        """Nothing of the loaded weights is held on to when it returns."""
        weight, scales = (getattr(layer, name).data for name in self.layer_param_names[:2])
        if not self.config.is_channelwise:  # one scale for each of the parts that are fused
            scales = torch.cat(
                [one.expand(width) for one, width in zip(scales, layer.logical_widths, strict=True)]  # type: ignore[arg-type]
            )
        return packed(weight, scales.reshape(-1, 1).float())

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.quantized_linear.call(x, layer.weight, layer.weight_scale, None, 8, layer.backplane_rows, bias)


def packed(weight: torch.Tensor, scales: torch.Tensor, piece: int = PIECE) -> Packed:
    """Of int8 [features, inputs] and one scale per output, in pieces, like other weights. The code 128 is zero."""
    layout = runtime().device.quantized_layout(8)
    width = layout.width
    features, fan_in = weight.shape
    padded = padded_size(fan_in, 0)
    codes = empty_codes(features, padded, 8, layout, weight.device)
    at_once = max(piece // (padded * width), 1) * width
    for first in range(0, features, at_once):
        part = weight[first : first + at_once].view(torch.uint8) ^ 128
        laid = packed_codes(torch.nn.functional.pad(part, (0, padded - fan_in)), 8, layout)
        codes[first // width : first // width + len(laid)] = laid
    return Packed(codes, packed_by_group(exact(scales), width), None)
