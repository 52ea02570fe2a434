"""Token embedding and the projection to logits, which share one table in tied models."""

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
from vllm_backplane.layers.deferred_weights import collect_bias


class IncrementalHeadMethod(ABC):
    """The method of an output head that takes its weight in pieces while the checkpoint is read."""

    @abstractmethod
    def loads(self, layer: ParallelLMHead, param: torch.Tensor) -> bool:
        """Returns whether `load` takes what comes for a parameter; vLLM's own loader takes everything else."""

    @abstractmethod
    def load(self, layer: ParallelLMHead, loaded: torch.Tensor) -> None:
        """Takes one tensor of the checkpoint."""


class BackplaneEmbeddingMethod(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        for head in getattr(layer, "backplane_tied_heads", ()):
            head.quant_method.copy_table(head, layer.weight.data)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.logits.call(x, layer.weight, bias)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return ops.embedding.call(input_, layer.weight)


class _OnOperators(VocabParallelEmbedding):
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedEmbeddingMethod:
            self.quant_method = BackplaneEmbeddingMethod()
        if not isinstance(self.quant_method, IncrementalHeadMethod):  # which does not collect
            collect_bias(self)


class BackplaneVocabParallelEmbedding(_OnOperators, VocabParallelEmbedding):
    pass


class BackplaneParallelLMHead(_OnOperators, ParallelLMHead):
    def weight_loader(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        if param is self.bias:
            param.backplane_loaded = True
        if isinstance(self.quant_method, IncrementalHeadMethod) and self.quant_method.loads(self, param):
            self.quant_method.load(self, loaded_weight)
        else:
            super().weight_loader(param, loaded_weight)
