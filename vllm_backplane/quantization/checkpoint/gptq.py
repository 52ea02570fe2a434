"""GPTQ checkpoints through vLLM's own configuration class.

vLLM's methods ask whether Marlin, a kernel for NVIDIA's cards, has the format, refuse the order by activation and drop
its `g_idx`; these subclasses do not. Zero points, which vLLM does not read, are served as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    get_dynamic_override,
    get_linear_quant_method,
    override_config,
)
from vllm.model_executor.models.utils import WeightsMapper

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.layers.deferred_weights import QKV
from vllm_backplane.quantization.checkpoint import mixed_precision
from vllm_backplane.quantization.checkpoint.experts import Layout, SchemeMoEMethod
from vllm_backplane.quantization.checkpoint.layer_loading import loaded_by_layer
from vllm_backplane.quantization.checkpoint.refusal import act_dtypes, refused

_ZEROS_LESS = {"gptq": 1, "gptq_v2": 0}
"""What stored zero points are too small by, for each format of a checkpoint."""


class BackplaneGPTQConfig(AutoGPTQConfig):
    TYPE_MAP: ClassVar[Mapping[tuple[int, bool], Any]] = {
        **{(bits, True): kind for bits, kind in mixed_precision.CENTRED.items()},
        **{(bits, False): kind for bits, kind in mixed_precision.WITH_ZEROS.items()},
    }

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        desc_act: bool,
        is_sym: bool,
        lm_head_quantized: bool,
        dynamic: dict[str, dict[str, int | bool]],
        full_config: dict[str, Any],
        modules_in_block_to_quantize: list[str] | None = None,
    ) -> None:
        if (weight_bits, is_sym) not in self.TYPE_MAP:
            raise refused(f"GPTQ with {weight_bits} bits")
        found = str(full_config.get("checkpoint_format") or "gptq")
        if found not in _ZEROS_LESS:
            raise refused(f"GPTQ in the format {found!r}")
        # The order by activation is ours, so vLLM's check does not see it.
        super().__init__(
            weight_bits, group_size, False, is_sym, lm_head_quantized, {}, full_config, modules_in_block_to_quantize
        )
        self.dynamic = dynamic
        self.desc_act = desc_act and group_size != -1
        self.zeros_less = _ZEROS_LESS[found]

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return act_dtypes()

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA's; there is none here

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """vLLM's drops g_idx."""
        return WeightsMapper()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        mixed_precision.register()
        if isinstance(layer, RoutedExperts):
            return self._for_experts(layer, prefix)
        return get_linear_quant_method(self, layer, prefix, BackplaneGPTQLinearMethod)

    def _for_experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        if get_dynamic_override(self, layer_name=prefix) is False:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        chosen = deepcopy(self)
        override_config(chosen, prefix=prefix)
        layout = Layout(
            bits=chosen.weight_bits,
            group=chosen.group_size,
            codes="qweight",
            scales="scales",
            zeros="qzeros",
            has_zeros=not chosen.is_sym,
            output=1,
            packed=0,
            zeros_less=self.zeros_less,
            groups_of="g_idx" if chosen.desc_act else None,
            beside=(() if chosen.desc_act else ("g_idx",)) + (("qzeros",) if chosen.is_sym else ()),
        )
        return SchemeMoEMethod(layer.moe_config, prefix, layout)


@register_weight_loader_v2_supported_method
class BackplaneGPTQLinearMethod(AutoGPTQLinearMethod):
    uses_meta_device = True

    def __init__(self, quant_config: BackplaneGPTQConfig) -> None:
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
        if self.quant_config.desc_act and input_size != input_size_per_partition:
            raise BackplaneError(
                "this GPTQ checkpoint orders weights by activation (desc_act), so the groups of a layer whose inputs "
                "are divided among workers are spread over all of them; use --tensor-parallel-size 1, or a checkpoint "
                "made with desc_act=False"
            )
        # In float32, scales are what the checkpoint says, whatever --dtype is.
        device = torch.get_default_device()
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
            # In memory from the start: a row that nothing is loaded into is told by what is in it.
            groups_of = torch.nn.Parameter(
                torch.full(
                    (len(output_partition_sizes), input_size_per_partition), -1, dtype=torch.int32, device=device
                ),
                requires_grad=False,
            )
            groups_of.weight_loader = self._load_groups  # type: ignore[attr-defined]
            layer.register_parameter("g_idx", groups_of)
        self.kernel.zeros_less = self.quant_config.zeros_less

    def _load_groups(self, param: torch.Tensor, loaded: torch.Tensor, shard: str | int | None = None) -> None:
        """Each part of a fused layer has a row. Where inputs are divided among workers, the order is the plain one
        (see create_weights), and what is here is not looked at. vLLM counts copies when weights are loaded again."""
        rows = param.data if shard is None else [param.data[QKV[shard] if isinstance(shard, str) else shard]]
        for row in rows:
            row.copy_(loaded[: len(row)])

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not hasattr(layer, "g_idx"):
            return
        groups_of: torch.Tensor = layer.g_idx.data  # type: ignore[assignment]
        if self.quant_config.desc_act:
            self.kernel.groups_of = _common(groups_of, getattr(layer, "prefix", "a layer"))
        super().process_weights_after_loading(layer)
        self.kernel.groups_of = None
        del layer.g_idx


def _common(groups_of: torch.Tensor, prefix: str) -> torch.Tensor:
    """The row that all parts of a layer have."""
    if bool((groups_of < 0).any()):
        raise CheckpointError(
            f"this GPTQ checkpoint orders weights by activation (desc_act), and there is no g_idx for {prefix}, or a "
            "negative one; fetch it again"
        )
    if bool((groups_of != groups_of[0]).any()):
        raise CheckpointError(
            f"the parts of {prefix} are ordered by activation in different ways, and vLLM multiplies them at once; use "
            "a checkpoint made with desc_act=False"
        )
    return groups_of[0]
