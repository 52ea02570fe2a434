"""Quantizes the LM head while it is loaded.

An untied head is quantized directly from the checkpoint's tensor. It is often the largest weight of a model; vLLM's
layerwise loading would hold all of it in full precision, which could set the peak of memory. A tied head becomes a
quantized copy of the embedding's table. The copy is made whenever the table is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.layers.embedding import SelfLoadingHeadMethod
from vllm_backplane.quantization.base import LinearWeights
from vllm_backplane.quantization.online.linear import OnlineLinearMethod, quantize
from vllm_backplane.quantization.packed_parameters import install_packed, packed_tensors


class OnlineHeadMethod(OnlineLinearMethod, SelfLoadingHeadMethod):
    def create_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        super().create_parameters(layer, weights)
        # Undoes the wrapping by vLLM's layerwise loading: `load` quantizes the weight without buffering it.
        layer.weight.weight_loader = weights.extra_attributes["weight_loader"]  # type: ignore[union-attr]

    def handles(self, layer: ParallelLMHead, param: torch.Tensor) -> bool:
        """Returns whether `param` is the weight and is loaded for the first time. vLLM's layerwise loading reloads it,
        because that keeps the addresses of the parameters."""
        return param.is_meta and param is layer.weight and get_layerwise_info(layer).kernel_tensors is None

    def load(self, layer: ParallelLMHead, loaded: torch.Tensor) -> None:
        """Quantizes this rank's part of the vocabulary. The padding of the vocabulary yields logits of zero."""
        if loaded.shape != (layer.org_vocab_size, layer.embedding_dim):
            raise BackplaneError(
                f"{self._prefix} has {tuple(loaded.shape)} weights in the checkpoint, and the model's configuration "
                f"requires {(layer.org_vocab_size, layer.embedding_dim)}; choose a checkpoint that matches it"
            )
        info, shard = get_layerwise_info(layer), layer.shard_indices
        rows = loaded[shard.org_vocab_start_index : shard.org_vocab_end_index]
        install_packed(layer, quantize(self.format, rows, layer.backplane_rows), device=info.restore_device)
        info.reset()

    def load_tied(self, layer: torch.nn.Module, table: torch.Tensor) -> None:
        quantized = quantize(self.format, table)
        kept = get_layerwise_info(layer).kernel_tensors
        if kept is None:
            install_packed(layer, quantized)
            return
        # vLLM holds the head's tensors aside during a reload, and puts them back afterwards.
        for name, tensor in packed_tensors(quantized).items():
            if tensor is not None:
                kept[0][name].data.copy_(tensor)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        get_layerwise_info(layer).reset()  # nothing is loaded into a tied head
        layer.backplane_tied = True  # type: ignore[assignment]
        heads: list[torch.nn.Module] = getattr(embed_tokens, "backplane_tied_heads", [])
        embed_tokens.backplane_tied_heads = [*heads, layer]  # type: ignore[assignment]
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Checks that everything was loaded. A tied head is quantized later, by `load_tied`."""
        if not getattr(layer, "backplane_tied", False):
            super().process_weights_after_loading(layer)
        bias: Any = getattr(layer, "bias", None)
        if bias is not None and layer.backplane_must_be_loaded and not getattr(bias, "backplane_loaded", False):
            raise CheckpointError(f"the checkpoint has no {self._prefix}.bias; choose a complete one")
