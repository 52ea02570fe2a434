"""AWQ checkpoints through vLLM's own configuration class.

On platforms that it does not know, vLLM would multiply by Triton or by a kernel for NVIDIA's cards; this subclass gives
every layer the method that asks for a mixed-precision kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMarlinLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_backplane.errors import BackplaneError
from vllm_backplane.quantization.checkpoint import mixed_precision
from vllm_backplane.quantization.checkpoint.experts import Layout, SchemeMoEMethod
from vllm_backplane.quantization.checkpoint.layer_loading import loaded_by_layer
from vllm_backplane.quantization.checkpoint.refusal import act_dtypes, refused

ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Where in a word the first code is, the second and so on, by bits: even codes in the lower half, odd in the upper."""


class BackplaneAWQConfig(AutoAWQConfig):
    TYPE_MAP: ClassVar[Mapping[int, Any]] = mixed_precision.WITH_ZEROS

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        zero_point: bool,
        lm_head_quantized: bool,
        modules_to_not_convert: list[str] | None = None,
        full_config: dict[str, Any] | None = None,
    ) -> None:
        if weight_bits not in self.TYPE_MAP:
            raise refused(f"AWQ with {weight_bits} bits")
        if not zero_point:
            raise refused("AWQ without zero points")
        found = str((full_config or {}).get("version", "gemm")).lower()
        if found != "gemm":
            raise refused(f"AWQ packed for {found!r}")
        super().__init__(weight_bits, group_size, zero_point, lm_head_quantized, modules_to_not_convert, full_config)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return act_dtypes()

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA's; there is none here

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        mixed_precision.register()
        head = isinstance(layer, ParallelLMHead)
        if not isinstance(layer, (LinearBase, RoutedExperts)) and not (head and self.lm_head_quantized):
            return None
        kept = is_layer_skipped(
            prefix, self.modules_to_not_convert, self.packed_modules_mapping, match_mode="substring"
        )
        if isinstance(layer, RoutedExperts):
            if kept:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return SchemeMoEMethod(layer.moe_config, prefix, self._layout())
        if kept:
            return UnquantizedEmbeddingMethod() if head else UnquantizedLinearMethod()
        return BackplaneAWQLinearMethod(self)

    def _layout(self) -> Layout:
        return Layout(
            bits=self.weight_bits,
            group=self.group_size,
            codes="qweight",
            scales="scales",
            zeros="qzeros",
            has_zeros=True,
            output=1,
            packed=1,
            order=ORDER[self.weight_bits],
        )


@register_weight_loader_v2_supported_method
class BackplaneAWQLinearMethod(AutoAWQMarlinLinearMethod):
    uses_meta_device = True

    def __init__(self, quant_config: BackplaneAWQConfig) -> None:
        self.quant_config = quant_config  # what vLLM's would do beside asks for Marlin
        self.quant_type = quant_config.quant_type
        self.input_dtype = None

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
        if self.quant_config.group_size == -1 and input_size != input_size_per_partition:
            raise BackplaneError(
                "the scales of this AWQ checkpoint are for whole rows, which cannot be divided among workers; use "
                "--tensor-parallel-size 1"
            )
        # In float32, scales are what the checkpoint says, whatever --dtype is.
        with loaded_by_layer(layer, len(output_partition_sizes), self.quant_config.packed_modules_mapping):
            super().create_weights(
                layer,
                input_size_per_partition,
                output_partition_sizes,
                input_size,
                output_size,
                torch.float32,
                **extra_weight_attrs,
            )
        self.kernel.word_order = ORDER[self.quant_config.weight_bits]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Without vLLM's own repacking: the kernel reads the order of AWQ."""
        self.kernel.process_weights_after_loading(layer)
