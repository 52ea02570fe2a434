"""Implements the linear kernel of vLLM's mixed-precision layers: weights of 4 or 8 bits with a scale per group.

vLLM's methods for GPTQ, AWQ and compressed-tensors create and load the weights. They select this kernel, which is
registered for out-of-tree platforms, and it packs the loaded weights.

Such checkpoints are made for inputs in full precision. The operator `quantized_linear` rounds its inputs: to 8 bits
with a scale per row and group, or to bfloat16, depending on the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig, register_linear_kernel
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm_backplane import ops
from vllm_backplane.errors import CheckpointError
from vllm_backplane.guards import guarded
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization.checkpoint.linear_method import replace_with_packed
from vllm_backplane.quantization.checkpoint.registration import require_usable_scales
from vllm_backplane.quantization.checkpoint.repacking import PackedWords, ZeroPoints, grouping_order, repack
from vllm_backplane.quantization.checkpoint.w8a8_int8 import BackplaneInt8Kernel
from vllm_backplane.runtime import runtime

SYMMETRIC = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}
"""vLLM's types of weights whose middle code is zero, by bits."""
WITH_ZERO_POINTS = {4: scalar_types.uint4, 8: scalar_types.uint8}
"""vLLM's types of weights with zero points, by bits."""


@guarded(
    "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel:MPLinearKernel._get_weight_params",
    why="it returns the loaded parameters in a fixed order",
    feature="integer checkpoints",
)
class BackplaneMixedPrecisionKernel(MPLinearKernel):
    word_order: tuple[int, ...] = ()
    """Position of each code in a word (see `PackedWords`); empty for consecutive codes."""
    zero_point_offset: int = 0
    """Added to each stored zero point."""
    group_index: torch.Tensor | None = None
    """The group of each input if the checkpoint has activation order. It is set before the weights are processed."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # a compute capability of CUDA, which Backplane's devices do not have

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        reason = _unsupported_reason(c)
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight. vLLM calls it when the layer is complete, and again when all layers are loaded."""
        if not hasattr(layer, self.w_q_name):
            return
        order = self._input_order(layer)
        needed: tuple[str, ...] = (self.w_q_name, self.w_s_name)
        if self._has_zero_points and self.w_zp_name is not None:
            needed += (self.w_zp_name,)
        # A symmetric checkpoint may store zero points, which are not used.
        replace_with_packed(layer, needed, lambda: self._repack(layer, order), unused=(self.w_zp_name,))
        if order is not None:
            layer.backplane_order = torch.nn.Parameter(order, requires_grad=False)

    @property
    def _has_zero_points(self) -> bool:
        return self.config.weight_type == WITH_ZERO_POINTS[self.config.weight_type.size_bits]

    def _input_order(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """Returns the order in which the inputs are gathered before the GEMM, or None if it is the stored order."""
        if self.group_index is None:
            return None
        scale: Any = getattr(layer, self.w_s_name)
        try:
            return grouping_order(self.group_index, scale.shape[1 - scale.output_dim])
        except ValueError as error:
            raise CheckpointError(
                f"the g_idx of {getattr(layer, 'prefix', 'a layer')} is not supported: {error}; use a checkpoint made "
                "with desc_act=False"
            ) from error

    def _repack(self, layer: torch.nn.Module, order: torch.Tensor | None) -> Packed:
        """Returns the packed weight. No reference to the loaded tensors remains, so that they can be freed."""
        fan_in, bits = self.config.partition_weight_shape[0], self.config.weight_type.size_bits
        loaded, scale, zero = self._get_weight_params(layer)
        scales = scale.data if scale.output_dim == 0 else scale.data.t()
        require_usable_scales(scales, getattr(layer, "prefix", "a layer"))
        zero_points = None
        if self._has_zero_points:
            zero_points = ZeroPoints(self._words(zero, bits), self.zero_point_offset)
        layout = runtime().device.quantized_layout(bits)
        return repack(self._words(loaded, bits), scales, zero_points, fan_in=fan_in, layout=layout, order=order)

    def _words(self, parameter: Any, bits: int) -> PackedWords:
        return PackedWords(parameter.data, bits, parameter.packed_dim, parameter.output_dim, self.word_order)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        order = getattr(layer, "backplane_order", None)
        if order is not None:
            x = x.index_select(-1, order)
        bits, features = self.config.weight_type.size_bits, self.config.partition_weight_shape[1]
        return ops.quantized_linear.call(x, layer.weight, layer.weight_scale, layer.weight_offset, bits, features, bias)


def _unsupported_reason(c: MPLinearLayerConfig) -> str | None:
    """Returns why a layer is not supported and what to do, or None if it is supported."""
    bits = c.weight_type.size_bits
    if c.weight_type not in (SYMMETRIC.get(bits), WITH_ZERO_POINTS.get(bits)):
        return f"weights of type {c.weight_type} are not supported; use a checkpoint with integers of 4 or 8 bits"
    fan_in, fan_out = c.partition_weight_shape
    per_word = 32 // bits
    if c.group_size != -1 and (c.group_size <= 0 or c.group_size % 8):
        return f"group size {c.group_size} is not a multiple of 8; use a checkpoint with another group size"
    if c.group_size != -1 and fan_in % c.group_size:
        return (
            f"{fan_in} inputs (of {c.full_weight_shape[0]}) are not a whole number of groups of {c.group_size}; choose "
            "another --tensor-parallel-size"
        )
    if fan_in % per_word or fan_out % per_word:
        return (
            f"{fan_in} inputs and {fan_out} outputs (of {c.full_weight_shape}) are not stored in whole words of "
            f"{per_word} codes; choose another --tensor-parallel-size"
        )
    return None


@cache
def register() -> None:
    """Registers both kernels with vLLM's linear methods, once per process."""
    register_linear_kernel(BackplaneMixedPrecisionKernel, PlatformEnum.OOT, "mp")
    register_linear_kernel(BackplaneInt8Kernel, PlatformEnum.OOT, "int8")
