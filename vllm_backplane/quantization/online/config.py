"""Configures `--quantization int8` and `int4`: selects the quantization method of each layer.

Linear layers, experts and the LM head are quantized. Embeddings, norms and routers keep the model's dtype.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_backplane.errors import BackplaneError
from vllm_backplane.quantization import base
from vllm_backplane.quantization.online import formats
from vllm_backplane.quantization.online.experts import OnlineMoEMethod
from vllm_backplane.quantization.online.head import OnlineHeadMethod
from vllm_backplane.quantization.online.linear import OnlineLinearMethod
from vllm_backplane.quantization.registration import register_quantization
from vllm_backplane.runtime import configured


class OnlineConfig(base.BackplaneQuantizationConfig):
    name: ClassVar[str]

    @classmethod
    def get_name(cls) -> Any:  # vLLM's type lists its own names
        return cls.name

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OnlineConfig:
        raise BackplaneError(_already_quantized(cls.name, config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> None:
        """Raises BackplaneError if the user requested this method for a checkpoint that is quantized already.

        vLLM calls it for every registered method.
        """
        if user_quant == cls.name:
            raise BackplaneError(_already_quantized(cls.name, hf_quant_cfg))

    def maybe_update_config(self, *_args: Any, **_kwargs: Any) -> None:
        if self.online_quantization_config is not None:
            raise BackplaneError(
                f"--quantization-config configures vLLM's own online quantization, and --quantization {self.name} does "
                "not use it; remove one of them (the option quantization_group sets group sizes)"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            return None
        if _is_router(layer, prefix) or _is_classifier_head(layer, prefix):
            return UnquantizedLinearMethod()
        config = get_current_vllm_config()
        is_head = isinstance(layer, ParallelLMHead)
        weight_format = formats.HEAD if is_head else formats.ONLINE[self.name]
        group = configured(config.additional_config).setting("quantization_group")
        if group is not None:
            weight_format = replace(weight_format, group=group)
        if isinstance(layer, RoutedExperts):
            must_be_loaded = config.load_config.load_format != "dummy"
            return OnlineMoEMethod(layer.moe_config, weight_format, prefix, must_be_loaded)
        method = OnlineHeadMethod if is_head else OnlineLinearMethod
        return method(weight_format, prefix, self.packed_modules_mapping)


def _is_router(layer: torch.nn.Module, prefix: str) -> bool:
    """Returns whether a layer computes router logits. Rounding its small weight would change the choice of experts.

    Some models pass their quantization configuration to the router. vLLM 0.30 has no common class for routers, so the
    layer's name decides as well.
    """
    named = isinstance(layer, ReplicatedLinear) and prefix.rpartition(".")[2] in ("gate", "router")
    return named or isinstance(layer, GateLinear)


def _is_classifier_head(layer: torch.nn.Module, prefix: str) -> bool:
    """Returns whether a layer is the head that vLLM adds to a model for classification.

    vLLM may add a bias to it while the checkpoint is read, on the device of its weight. The weight must have memory by
    then.
    """
    return isinstance(layer, ReplicatedLinear) and prefix.rpartition(".")[2] == "score"


def _already_quantized(name: str, found: dict[str, Any]) -> str:
    return (
        f"--quantization {name} quantizes a full-precision checkpoint, and this one is quantized already "
        f"({found.get('quant_method', 'unknown method')}); choose the full-precision checkpoint"
    )


class Int8Config(OnlineConfig):
    name = "int8"


class Int4Config(OnlineConfig):
    name = "int4"


def register() -> None:
    """Registers both values of --quantization with vLLM, once per process."""
    for config in (Int8Config, Int4Config):
        register_quantization(config.name, config)
