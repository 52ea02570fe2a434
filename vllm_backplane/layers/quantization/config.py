"""`--quantization int8` and `int4`: weights of a full-precision checkpoint are quantized while they are loaded.

vLLM asks a class, registered by name, for the method of each layer. Linear layers and the projection to logits are
quantized; embeddings, norms and experts keep the type of the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_backplane.errors import BackplaneError
from vllm_backplane.layers.quantization import base, formats
from vllm_backplane.layers.quantization.head import QuantizedHeadMethod
from vllm_backplane.layers.quantization.linear import QuantizedLinearMethod
from vllm_backplane.runtime import configured

logger = init_logger("vllm." + __name__)


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
        if isinstance(layer, RoutedExperts):
            logger.info_once(
                "--quantization %s: the experts of this model keep its type; linear layers are quantized.", self.name
            )
            return None
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        config = get_current_vllm_config()
        head = isinstance(layer, ParallelLMHead)
        chosen = formats.HEAD if head else formats.ONLINE[self.name]
        group = configured(config.additional_config).setting("quantization_group")
        if group is not None:
            chosen = replace(chosen, group=group)
        must_be_loaded = config.load_config.load_format != "dummy"
        return (QuantizedHeadMethod if head else QuantizedLinearMethod)(chosen, prefix, must_be_loaded)


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
