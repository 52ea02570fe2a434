"""The projection to logits with quantized weights.

A head of its own is quantized in pieces as it comes from the checkpoint: often the largest weight of a model, it would
decide the peak of memory if it were loaded first. A head that is tied to the embedding becomes a quantized copy of
that table, made when the table is loaded, and made again when the table is loaded again.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.layers.embedding import IncrementalHeadMethod
from vllm_backplane.quantization.online.linear import QuantizedLinearMethod, install, named


class QuantizedHeadMethod(QuantizedLinearMethod, IncrementalHeadMethod):
    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        # Not collected like the weights of other layers: `load` does without.
        layer.weight.weight_loader = kwargs["weight_loader"]  # type: ignore[union-attr]

    def loads(self, layer: ParallelLMHead, param: torch.Tensor) -> bool:
        """Whether `load` is to take what comes for a parameter: the weight, at the first loading. A later one goes
        vLLM's way, which keeps the addresses of what is there."""
        return param.is_meta and param is layer.weight and get_layerwise_info(layer).kernel_tensors is None

    def load(self, layer: ParallelLMHead, loaded: torch.Tensor) -> None:
        """Quantize this worker's part of the vocabulary. What pads the vocabulary gives logits of zero."""
        if loaded.shape != (layer.org_vocab_size, layer.embedding_dim):
            raise BackplaneError(
                f"{self._prefix} has {tuple(loaded.shape)} weights in the checkpoint, and the model's configuration "
                f"asks for {(layer.org_vocab_size, layer.embedding_dim)}; choose a checkpoint that fits it"
            )
        info, shard = get_layerwise_info(layer), layer.shard_indices
        made = self.quantize(loaded[shard.org_vocab_start_index : shard.org_vocab_end_index], layer.backplane_rows)
        install(layer, made, info.restore_device)
        info.reset()

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        get_layerwise_info(layer).reset()  # nothing is loaded into it
        layer.backplane_tied = True  # type: ignore[assignment]
        heads: list[torch.nn.Module] = getattr(embed_tokens, "backplane_tied_heads", [])
        embed_tokens.backplane_tied_heads = [*heads, layer]  # type: ignore[assignment]
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """A tied head waits for its table; `copy_table` is called then."""
        if not getattr(layer, "backplane_tied", False):
            super().process_weights_after_loading(layer)
        bias: Any = getattr(layer, "bias", None)
        if bias is not None and layer.backplane_must_be_loaded and not getattr(bias, "backplane_loaded", False):
            raise CheckpointError(f"the checkpoint has no {self._prefix}.bias; choose a complete one")

    def copy_table(self, layer: torch.nn.Module, table: torch.Tensor) -> None:
        made = self.quantize(table)
        kept = get_layerwise_info(layer).kernel_tensors
        if kept is None:
            install(layer, made)
        else:  # vLLM has put the head's tensors aside while it loads weights anew
            for name, tensor in named(made).items():
                kept[0][name].data.copy_(tensor)
