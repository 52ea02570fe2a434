"""The product of vLLM's mixed-precision layers: weights of 4 or 8 bits with a scale per group.

Such a checkpoint has inputs in full precision. Here `quantized_linear` rounds them as it does all of its inputs: to 8
bits with a scale per row and group, or to bfloat16 where a device does that instead.

vLLM's methods for GPTQ, AWQ and compressed-tensors create and load the weights; this kernel, registered for out-of-tree
platforms, takes them over when they are loaded.
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
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization.checkpoint.layer_loading import exchange
from vllm_backplane.quantization.checkpoint.repacking import Words, Zeros, adjacent, repacked
from vllm_backplane.quantization.checkpoint.w8a8_int8 import BackplaneInt8Kernel
from vllm_backplane.runtime import runtime

CENTRED = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}
"""The type that vLLM gives to weights whose middle code is zero, by bits."""
WITH_ZEROS = {4: scalar_types.uint4, 8: scalar_types.uint8}
"""The type that it gives to those that have zero points."""


class BackplaneMixedPrecisionKernel(MPLinearKernel):
    word_order: tuple[int, ...] = ()
    """Of codes in a word (see `Words`), where a checkpoint has its own."""
    zeros_less: int = 0
    """What stored zero points are too small by."""
    groups_of: torch.Tensor | None = None
    """The group of each input position, where they do not lie in order; set before the weights are processed."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA's; there is none here

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        reason = _misfit(c)
        return reason is None, reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called as soon as the layer is loaded, and by vLLM once more when all are."""
        if not hasattr(layer, self.w_q_name):
            return
        order = self._order(layer)
        needed: tuple[str, ...] = (self.w_q_name, self.w_s_name)
        if self._has_zeros and self.w_zp_name is not None:
            needed += (self.w_zp_name,)
        # Zero points may be stored and not used.
        exchange(layer, needed, lambda: self._repack(layer, order), beside=(self.w_zp_name,))
        if order is not None:
            layer.backplane_order = torch.nn.Parameter(order, requires_grad=False)

    @property
    def _has_zeros(self) -> bool:
        return self.config.weight_type == WITH_ZEROS[self.config.weight_type.size_bits]

    def _order(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """Of inputs, where they are to be gathered by groups."""
        if self.groups_of is None:
            return None
        scale: Any = getattr(layer, self.w_s_name)
        try:
            return adjacent(self.groups_of, scale.shape[1 - scale.output_dim])
        except ValueError as fault:
            raise CheckpointError(
                f"the g_idx of {getattr(layer, 'prefix', 'a layer')} cannot be served: {fault}; use a checkpoint "
                "made with desc_act=False"
            ) from fault

    def _repack(self, layer: torch.nn.Module, order: torch.Tensor | None) -> Packed:
        """Nothing of the loaded weights is held on to when it returns."""
        fan_in, bits = self.config.partition_weight_shape[0], self.config.weight_type.size_bits
        loaded, scale, zero = self._get_weight_params(layer)
        scales = scale.data if scale.output_dim == 0 else scale.data.t()
        zeros = None
        if self._has_zeros:
            zeros = Zeros(self._words(zero, bits), self.zeros_less)
        layout = runtime().device.quantized_layout(bits)
        return repacked(self._words(loaded, bits), scales, zeros, fan_in=fan_in, layout=layout, order=order)

    def _words(self, parameter: Any, bits: int) -> Words:
        return Words(parameter.data, bits, parameter.packed_dim, parameter.output_dim, self.word_order)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        order = getattr(layer, "backplane_order", None)
        if order is not None:
            x = x.index_select(-1, order)
        bits, features = self.config.weight_type.size_bits, self.config.partition_weight_shape[1]
        return ops.quantized_linear.call(x, layer.weight, layer.weight_scale, layer.weight_offset, bits, features, bias)


def _misfit(c: MPLinearLayerConfig) -> str | None:
    """Why a layer cannot be multiplied, and what to do about it."""
    bits = c.weight_type.size_bits
    if c.weight_type not in (CENTRED.get(bits), WITH_ZEROS.get(bits)):
        return f"weights of type {c.weight_type} are not served; use a checkpoint with integers of 4 or 8 bits"
    fan_in, fan_out = c.partition_weight_shape
    per_word = 32 // bits
    if c.group_size != -1 and (c.group_size <= 0 or c.group_size % 8):
        return f"groups of {c.group_size} weights are not a multiple of 8; use a checkpoint with others"
    if c.group_size != -1 and fan_in % c.group_size:
        return (
            f"{fan_in} inputs (of {c.full_weight_shape[0]}) are no whole number of groups of {c.group_size}; choose "
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
    """Offer both kernels to vLLM's own methods, once per process."""
    register_linear_kernel(BackplaneMixedPrecisionKernel, PlatformEnum.OOT, "mp")
    register_linear_kernel(BackplaneInt8Kernel, PlatformEnum.OOT, "int8")
