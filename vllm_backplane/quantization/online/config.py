"""`--quantization int8` and `int4`: weights of a full-precision checkpoint are quantized while they are loaded.

vLLM asks a class, registered by name, for the method of each layer. Linear layers, experts and the
projection to logits are quantized; embeddings, norms and routers keep the type of the model.
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
from vllm_backplane.quantization.online.experts import QuantizedMoEMethod
from vllm_backplane.quantization.online.head import QuantizedHeadMethod
from vllm_backplane.quantization.online.linear import QuantizedLinearMethod
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
        """vLLM asks this of every method when a checkpoint is quantized."""
        if user_quant == cls.name:
            raise BackplaneError(_already_quantized(cls.name, hf_quant_cfg))

    def maybe_update_config(self, *_args: Any, **_kwargs: Any) -> None:
        if self.online_quantization_config is not None:
            raise BackplaneError(
                f"--quantization-config describes vLLM's own online quantization, which --quantization {self.name} "
                "does not read; remove one of them (group sizes are set by the option quantization_group)"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            return None
        if _routes(layer, prefix) or _classifies(layer, prefix):
            return UnquantizedLinearMethod()
        config = get_current_vllm_config()
        head = isinstance(layer, ParallelLMHead)
        chosen = formats.HEAD if head else formats.ONLINE[self.name]
        group = configured(config.additional_config).setting("quantization_group")
        if group is not None:
            chosen = replace(chosen, group=group)
        if isinstance(layer, RoutedExperts):
            return QuantizedMoEMethod(layer.moe_config, chosen, prefix, config.load_config.load_format != "dummy")
        method = QuantizedHeadMethod if head else QuantizedLinearMethod
        return method(chosen, prefix, self.packed_modules_mapping)


def _routes(layer: torch.nn.Module, prefix: str) -> bool:
    """Whether it chooses experts: there a rounding changes which, and little is to be saved. Some models give it to be
    quantized; vLLM 0.30 does not have a class of its own for it everywhere."""
    named = isinstance(layer, ReplicatedLinear) and prefix.rpartition(".")[2] in ("gate", "router")
    return named or isinstance(layer, GateLinear)


def _classifies(layer: torch.nn.Module, prefix: str) -> bool:
    """Whether it is the head that vLLM adds to a model in order to classify with it. It may get a bias when one is
    read, on the device of its weight, which must be there by then."""
    return isinstance(layer, ReplicatedLinear) and prefix.rpartition(".")[2] == "score"


def _already_quantized(name: str, found: dict[str, Any]) -> str:
    return (
        f"--quantization {name} makes quantized weights of a full-precision checkpoint, and this one is quantized "
        f"already ({found.get('quant_method', 'unknown method')}); choose the full-precision checkpoint"
    )


class Int8Config(OnlineConfig):
    name = "int8"


class Int4Config(OnlineConfig):
    name = "int4"


def register() -> None:
    for config in (Int8Config, Int4Config):
        base.register(config.name, config)
