"""Loads GPTQ checkpoints through subclasses of vLLM's configuration and linear method.

vLLM's classes require Marlin, a kernel for NVIDIA GPUs, refuse activation order (desc_act) and drop `g_idx`. The
subclasses support activation order, and zero points, which vLLM does not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    flatten_list,
    get_dynamic_override,
    get_linear_quant_method,
    override_config,
)
from vllm.model_executor.models.utils import WeightsMapper

from vllm_backplane.errors import BackplaneError, CheckpointError, short_repr
from vllm_backplane.guards import guarded
from vllm_backplane.layers.layerwise_loading import QKV_SHARDS
from vllm_backplane.quantization.base import AnyDeviceConfig, LinearWeights
from vllm_backplane.quantization.checkpoint import mixed_precision
from vllm_backplane.quantization.checkpoint.experts import CheckpointMoEMethod, ExpertFormat
from vllm_backplane.quantization.checkpoint.linear_method import CheckpointLinearMethod
from vllm_backplane.quantization.checkpoint.registration import names_config_faults, require_integers, unsupported

_ZERO_POINT_OFFSET = {"gptq": 1, "gptq_v2": 0}
"""Difference between a zero point and its stored value, by checkpoint format."""


@guarded(
    "vllm.model_executor.layers.quantization.auto_gptq:AutoGPTQConfig.__init__",
    "vllm.model_executor.layers.quantization.auto_gptq:AutoGPTQConfig.get_quant_method",
    why="it chooses the methods of Backplane by the same rules",
    feature="GPTQ",
)
class BackplaneGPTQConfig(AnyDeviceConfig, AutoGPTQConfig):
    TYPE_MAP: ClassVar[Mapping[tuple[int, bool], Any]] = {
        **{(bits, True): kind for bits, kind in mixed_precision.SYMMETRIC.items()},
        **{(bits, False): kind for bits, kind in mixed_precision.WITH_ZERO_POINTS.items()},
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
        require_integers("GPTQ", bits=weight_bits, group_size=group_size)
        for rule in dynamic.values():
            require_integers("GPTQ", **{name: rule[name] for name in ("bits", "group_size") if name in rule})
        if type(is_sym) is not bool:
            raise CheckpointError(
                f"the quantization config of this GPTQ checkpoint has {short_repr(is_sym)} for sym, not true or false; "
                "download the checkpoint again"
            )
        if (weight_bits, is_sym) not in self.TYPE_MAP:
            raise unsupported(f"GPTQ with {weight_bits} bits")
        checkpoint_format = str(full_config.get("checkpoint_format") or "gptq")
        if checkpoint_format not in _ZERO_POINT_OFFSET:
            raise unsupported(f"GPTQ in the format {checkpoint_format!r}")
        # vLLM's constructor refuses desc_act, in the dynamic rules too, so both are set afterwards.
        super().__init__(
            weight_bits, group_size, False, is_sym, lm_head_quantized, {}, full_config, modules_in_block_to_quantize
        )
        self.dynamic = dynamic
        self.desc_act = desc_act and group_size != -1
        self.zero_point_offset = _ZERO_POINT_OFFSET[checkpoint_format]

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Returns a mapper that keeps all names; vLLM's drops `g_idx`."""
        return WeightsMapper()

    @names_config_faults
    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        mixed_precision.register()
        if isinstance(layer, RoutedExperts):
            return self._expert_method(layer, prefix)
        return get_linear_quant_method(self._with_named_layers(), layer, prefix, BackplaneGPTQLinearMethod)

    def _with_named_layers(self) -> BackplaneGPTQConfig:
        """Returns the configuration with the names of its quantized layers, or with one that all layers contain.

        vLLM reads the names from the checkpoint's metadata. If there are none, 0.30 and 0.31 load no layer quantized.
        """
        if flatten_list(self.modules_in_block_to_quantize):
            return self
        config = copy(self)
        config.modules_in_block_to_quantize = [""]
        return config

    def _expert_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        if get_dynamic_override(self, layer_name=prefix) is False:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        config = deepcopy(self)
        override_config(config, prefix=prefix)
        expert_format = ExpertFormat(
            bits=config.weight_bits,
            group=config.group_size,
            codes="qweight",
            scales="scales",
            zero_points="qzeros",
            has_zero_points=not config.is_sym,
            output_dim=1,
            packed_dim=0,
            zero_point_offset=self.zero_point_offset,
            group_index="g_idx" if config.desc_act else None,
            ignored=(() if config.desc_act else ("g_idx",)) + (("qzeros",) if config.is_sym else ()),
        )
        return CheckpointMoEMethod(layer.moe_config, prefix, expert_format)


@register_weight_loader_v2_supported_method
@guarded(
    "vllm.model_executor.layers.quantization.auto_gptq:AutoGPTQLinearMethod.__init__",
    why="it is not called, because it needs the Marlin kernel",
    feature="GPTQ",
)
class BackplaneGPTQLinearMethod(CheckpointLinearMethod, AutoGPTQLinearMethod):
    any_integers = ("g_idx",)

    def __init__(self, quant_config: BackplaneGPTQConfig) -> None:
        # Without vLLM's constructor, which requires the Marlin kernel.
        self.quant_config = quant_config
        self.quant_type = quant_config.quant_type
        self.input_dtype = None

    def check_weights(self, weights: LinearWeights) -> None:
        if self.quant_config.desc_act and weights.is_row_parallel:
            raise BackplaneError(
                "this GPTQ checkpoint has activation order (desc_act), so each quantization group of a row-parallel "
                "layer has inputs on several workers; use --tensor-parallel-size 1, or a checkpoint made with "
                "desc_act=False"
            )

    def extend_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        """Adds `g_idx`, one row for each fused weight. It has memory from the start: -1 marks a row that the checkpoint
        does not have."""
        shape = (len(weights.output_partition_sizes), weights.input_size_per_partition)
        # int64, so that no group of a checkpoint with int64 becomes another one.
        group_index = torch.nn.Parameter(torch.full(shape, -1, dtype=torch.int64), requires_grad=False)
        inputs = weights.input_size if self.quant_config.desc_act else None
        group_index.weight_loader = partial(_load_group_index, inputs)  # type: ignore[attr-defined]
        layer.register_parameter("g_idx", group_index)
        self.kernel.zero_point_offset = self.quant_config.zero_point_offset

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not hasattr(layer, "g_idx"):
            return
        group_index: torch.Tensor = layer.g_idx.data  # type: ignore[assignment]
        if self.quant_config.desc_act:
            self.kernel.group_index = _common_row(group_index, getattr(layer, "prefix", "a layer"))
        super().process_weights_after_loading(layer)
        self.kernel.group_index = None
        del layer.g_idx


def _load_group_index(
    inputs: int | None,
    param: torch.Tensor,
    loaded: torch.Tensor,
    shard: str | int | tuple[int, ...] | None = None,
) -> None:
    """Copies the group of each input into the rows of a fused weight, or of several.

    Without activation order, `inputs` is None and nothing uses the values. They are copied as far as the row has room,
    because vLLM counts the copied elements during a reload. The same holds for a row-parallel layer, which has no
    activation order (see `check_weights`).
    """
    if loaded.shape != (inputs,) and (inputs is not None or loaded.dim() != 1 or len(loaded) < param.shape[1]):
        raise CheckpointError(
            f"a g_idx of this GPTQ checkpoint has the shape {tuple(loaded.shape)}, and its layer "
            f"{inputs or param.shape[1]} inputs; download the checkpoint again"
        )
    if isinstance(shard, str):
        shard = QKV_SHARDS[shard]
    rows = range(len(param.data)) if shard is None else shard if isinstance(shard, tuple) else (shard,)
    for row in rows:
        param.data[row].copy_(loaded[: param.shape[1]])


def _common_row(group_index: torch.Tensor, prefix: str) -> torch.Tensor:
    """Returns the row that all fused weights of a layer share. Raises CheckpointError if they differ."""
    if bool((group_index < 0).any()):
        raise CheckpointError(
            f"this GPTQ checkpoint has activation order (desc_act), and there is no g_idx for {prefix}, or a negative "
            "one; download the checkpoint again"
        )
    if bool((group_index != group_index[0]).any()):
        raise CheckpointError(
            f"the fused weights of {prefix} have different activation orders (g_idx), and vLLM computes them in one "
            "GEMM; use a checkpoint made with desc_act=False"
        )
    return group_index[0]
