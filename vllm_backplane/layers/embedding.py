"""Token embedding and the projection to logits, which share one table in tied models."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_backplane import ops


class BackplaneEmbeddingMethod(UnquantizedEmbeddingMethod):
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


class BackplaneVocabParallelEmbedding(_OnOperators, VocabParallelEmbedding):
    pass


class BackplaneParallelLMHead(_OnOperators, ParallelLMHead):
    pass
