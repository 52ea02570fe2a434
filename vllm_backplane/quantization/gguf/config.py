"""Configures the quantization `gguf`: selects the method of each layer of a GGUF model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_backplane.errors import BackplaneError
from vllm_backplane.gguf.hf_config import QUANTIZATION
from vllm_backplane.quantization import base
from vllm_backplane.quantization.gguf.embedding import GgufEmbeddingMethod, GgufHeadMethod
from vllm_backplane.quantization.gguf.experts import GgufMoEMethod
from vllm_backplane.quantization.gguf.linear import GgufLinearMethod


class GgufConfig(base.BackplaneQuantizationConfig):
    """Gives each layer of a model from a GGUF file its quantization method. vLLM calls it while it builds the model."""

    @classmethod
    def get_name(cls) -> Any:  # vLLM's type lists its own names
        return QUANTIZATION

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GgufConfig:
        if not {"file", "header"} <= config.keys():
            raise BackplaneError(
                "this folder's config declares GGUF weights without naming their file; start with the path of the "
                "GGUF file"
            )
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return GgufMoEMethod(layer.moe_config, prefix)
        if isinstance(layer, LinearBase):
            return GgufLinearMethod(prefix)
        if isinstance(layer, ParallelLMHead):
            return GgufHeadMethod(prefix)
        if isinstance(layer, VocabParallelEmbedding):
            tied = bool(getattr(get_current_vllm_config().model_config.hf_config, "tie_word_embeddings", False))
            return GgufEmbeddingMethod(prefix, used_as_head=tied)
        return None
