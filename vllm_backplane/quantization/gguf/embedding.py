"""Loads the embedding and the LM head from a GGUF file.

The embedding reads few rows at a time, so its table stays in the mapped file, which all workers of a host share. Logits
read the whole table, from a packed copy; a tied model packs the embedding's table. A table of a floating-point type
stays in the file if it has the model's dtype and the model is not tied.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf.decoding import FLOATS, Type, dequantized
from vllm_backplane.gguf.packing import require_finite, require_finite_blocks
from vllm_backplane.layers.embedding import BackplaneEmbeddingMethod
from vllm_backplane.layers.linear import refuse_loading
from vllm_backplane.quantization.base import LinearQuantizationMethod, LinearWeights
from vllm_backplane.quantization.gguf.linear import GgufLinearMethod
from vllm_backplane.quantization.gguf.packed_rows import (
    PackedRows,
    float_values,
    install_packed_rows,
    require_lazy,
    shape_mismatch,
)


class GgufEmbeddingMethod(LinearQuantizationMethod):
    """Loads and computes the embedding. With `used_as_head`, the model is tied, and the table computes logits too."""

    def __init__(self, prefix: str, *, used_as_head: bool) -> None:
        self._prefix = prefix
        self._used_as_head = used_as_head
        self._used_as_embedding = True
        self._packed_rows: list[PackedRows] = []
        self._kind: Type | None = None

    def create_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        # Without the attributes: the weight loader among them refers to the layer, which would become a cycle.
        self._weights = replace(weights, extra_attributes={})
        self._device = torch.empty(0).device
        weight = torch.nn.Parameter(weights.meta_weight(), requires_grad=False)
        weight.weight_loader = partial(self._load, layer)  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)

    def _load(self, layer: Any, _parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        tensor = require_lazy(loaded, self._prefix)
        if tensor.shape != (layer.org_vocab_size, layer.embedding_dim):
            raise shape_mismatch(tensor, self._prefix, (layer.org_vocab_size, layer.embedding_dim))
        shard, dtype = layer.shard_indices, self._weights.params_dtype
        rows = tensor.rows[shard.org_vocab_start_index : shard.org_vocab_end_index]
        self._kind = tensor.kind
        if self._kind in FLOATS:
            layer.weight = torch.nn.Parameter(self._float_table(self._kind, rows).to(self._device), requires_grad=False)
            layer.weight.weight_loader = refuse_loading  # the mapped file is read-only
            layer.quant_method = BackplaneEmbeddingMethod()
            return
        if self._used_as_head:
            vocabulary = self._weights.output_size_per_partition
            self._packed_rows = install_packed_rows(layer, [(self._kind, rows)], dtype, self._device, vocabulary)
        else:  # a packed table has been checked
            require_finite_blocks(rows, self._kind)
        if self._used_as_embedding:
            name = "blocks" if self._used_as_head else "weight"
            setattr(layer, name, torch.nn.Parameter(rows.to(self._device), requires_grad=False))

    def _float_table(self, kind: Type, rows: torch.Tensor) -> torch.Tensor:
        """Returns the table in the model's dtype: a view of the file if possible."""
        weights, dtype = self._weights, self._weights.params_dtype
        vocabulary = weights.output_size_per_partition
        if FLOATS[kind] == dtype and len(rows) == vocabulary and not self._used_as_head:
            values = rows.view(dtype)
            require_finite(values, kind)
            return values
        table = torch.zeros(vocabulary, weights.input_size_per_partition, dtype=dtype, device="cpu")
        return float_values([(kind, rows)], dtype, table)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self._kind is None:
            raise CheckpointError(f"the file has no weights for {self._prefix}; choose a complete one")

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        assert self._kind is not None
        blocks = layer.blocks if self._used_as_head else layer.weight
        values = dequantized(blocks[input_.flatten()], self._kind)
        return values.to(self._weights.params_dtype).view(*input_.shape, values.shape[-1])

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._packed_rows:
            raise BackplaneError(
                f"the model computes logits with {self._prefix}, but its configuration does not tie the embedding to "
                "the LM head; use the model's original checkpoint"
            )
        return GgufLinearMethod.apply_packed_rows(layer, self._packed_rows, x, bias)


class GgufHeadMethod(GgufEmbeddingMethod):
    """Loads and computes the LM head. A tied head computes with the embedding's packed table."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, used_as_head=True)
        self._used_as_embedding = False
        self._tied: list[Any] = []  # a list, so that the embedding does not become a submodule

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        self._tied = [embed_tokens]
        layer.weight = torch.nn.Parameter(torch.empty(0, device=self._device), requires_grad=False)
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not self._tied:
            super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._tied:
            (embed_tokens,) = self._tied
            return embed_tokens.quant_method.apply(embed_tokens, x, bias)
        return super().apply(layer, x, bias)
