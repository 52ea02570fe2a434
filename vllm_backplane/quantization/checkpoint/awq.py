"""Loads AWQ checkpoints through subclasses of vLLM's configuration and linear method.

On out-of-tree platforms, vLLM would select Triton or a kernel for NVIDIA GPUs. The configuration here gives every layer
the method that selects a mixed-precision kernel from vLLM's registry, which is Backplane's.
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
from vllm_backplane.guards import guarded
from vllm_backplane.quantization.base import AnyDeviceConfig, LinearWeights
from vllm_backplane.quantization.checkpoint import mixed_precision
from vllm_backplane.quantization.checkpoint.experts import CheckpointMoEMethod, ExpertFormat
from vllm_backplane.quantization.checkpoint.linear_method import CheckpointLinearMethod
from vllm_backplane.quantization.checkpoint.registration import names_config_faults, require_integers, unsupported

WORD_ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Positions of the codes in a word, by bits of a code: even codes are in the lower half, odd codes in the upper."""


@guarded(
    "vllm.model_executor.layers.quantization.auto_awq:AutoAWQConfig.get_quant_method",
    why="it chooses the methods of Backplane by the same rules",
    feature="AWQ",
)
class BackplaneAWQConfig(AnyDeviceConfig, AutoAWQConfig):
    TYPE_MAP: ClassVar[Mapping[int, Any]] = mixed_precision.WITH_ZERO_POINTS

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        zero_point: bool,
        lm_head_quantized: bool,
        modules_to_not_convert: list[str] | None = None,
        full_config: dict[str, Any] | None = None,
    ) -> None:
        require_integers("AWQ", bits=weight_bits, group_size=group_size)
        if weight_bits not in self.TYPE_MAP:
            raise unsupported(f"AWQ with {weight_bits} bits")
        if not zero_point:
            raise unsupported("AWQ without zero points")
        version = str((full_config or {}).get("version", "gemm")).lower()
        if version != "gemm":
            raise unsupported(f"AWQ packed for {version!r}")
        super().__init__(weight_bits, group_size, zero_point, lm_head_quantized, modules_to_not_convert, full_config)

    @names_config_faults
    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        mixed_precision.register()
        is_head = isinstance(layer, ParallelLMHead)
        if not isinstance(layer, (LinearBase, RoutedExperts)) and not (is_head and self.lm_head_quantized):
            return None
        is_unquantized = is_layer_skipped(
            prefix, self.modules_to_not_convert, self.packed_modules_mapping, match_mode="substring"
        )
        if isinstance(layer, RoutedExperts):
            if is_unquantized:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return CheckpointMoEMethod(layer.moe_config, prefix, self._expert_format())
        if is_unquantized:
            return UnquantizedEmbeddingMethod() if is_head else UnquantizedLinearMethod()
        return BackplaneAWQLinearMethod(self)

    def _expert_format(self) -> ExpertFormat:
        return ExpertFormat(
            bits=self.weight_bits,
            group=self.group_size,
            codes="qweight",
            scales="scales",
            zero_points="qzeros",
            has_zero_points=True,
            output_dim=1,
            packed_dim=1,
            word_order=WORD_ORDER[self.weight_bits],
        )


@register_weight_loader_v2_supported_method
@guarded(
    "vllm.model_executor.layers.quantization.auto_awq:AutoAWQMarlinLinearMethod.__init__",
    "vllm.model_executor.layers.quantization.auto_awq:AutoAWQMarlinLinearMethod.process_weights_after_loading",
    why="they are not called, because they need the Marlin kernel",
    feature="AWQ",
)
class BackplaneAWQLinearMethod(CheckpointLinearMethod, AutoAWQMarlinLinearMethod):
    def __init__(self, quant_config: BackplaneAWQConfig) -> None:
        # Without vLLM's constructor, which requires the Marlin kernel.
        self.quant_config = quant_config
        self.quant_type = quant_config.quant_type
        self.input_dtype = None

    def check_weights(self, weights: LinearWeights) -> None:
        if self.quant_config.group_size == -1 and weights.is_row_parallel:
            raise BackplaneError(
                "this AWQ checkpoint has one scale per output (group_size -1), which cannot be divided among workers; "
                "use --tensor-parallel-size 1"
            )

    def extend_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        self.kernel.word_order = WORD_ORDER[self.quant_config.weight_bits]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight. vLLM's method would repack it first; Backplane's kernel reads AWQ's word order."""
        self.kernel.process_weights_after_loading(layer)
