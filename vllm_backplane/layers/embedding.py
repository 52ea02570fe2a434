"""Computes token embeddings and logits with the operators `embedding` and `logits`.

Tied models use one table for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_backplane import ops
from vllm_backplane.guards import guarded
from vllm_backplane.layers.layerwise_loading import defer_bias_loading


class SelfLoadingHeadMethod(ABC):
    """Loads the weight of an LM head itself, as a quantization method.

    vLLM's layerwise loading would hold the whole weight in full precision. A method of this kind converts each tensor
    as the checkpoint supplies it, and converts the table of the embedding for a tied head.
    """

    @abstractmethod
    def handles(self, layer: ParallelLMHead, param: torch.Tensor) -> bool:
        """Returns whether `load` loads a parameter. vLLM's own loader loads the others."""

    @abstractmethod
    def load(self, layer: ParallelLMHead, loaded: torch.Tensor) -> None:
        """Converts the head's weight from one tensor of the checkpoint."""

    @abstractmethod
    def load_tied(self, layer: torch.nn.Module, table: torch.Tensor) -> None:
        """Converts the weight of a tied head from the embedding's table."""


@guarded(
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.embedding",
    why="operators compute the same",
)
class BackplaneEmbeddingMethod(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        for head in getattr(layer, "backplane_tied_heads", ()):
            head.quant_method.load_tied(head, layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.logits.call(x, layer.weight, bias)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return ops.embedding.call(input_, layer.weight)


class _BackplaneEmbedding(VocabParallelEmbedding):
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedEmbeddingMethod:
            self.quant_method = BackplaneEmbeddingMethod()
        if not isinstance(self.quant_method, SelfLoadingHeadMethod):
            defer_bias_loading(self)


class BackplaneVocabParallelEmbedding(_BackplaneEmbedding, VocabParallelEmbedding):
    pass


class BackplaneParallelLMHead(_BackplaneEmbedding, ParallelLMHead):
    def weight_loader(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        if param is self.bias:
            param.backplane_loaded = True
        if isinstance(self.quant_method, SelfLoadingHeadMethod) and self.quant_method.handles(self, param):
            self.quant_method.load(self, loaded_weight)
        else:
            super().weight_loader(param, loaded_weight)
