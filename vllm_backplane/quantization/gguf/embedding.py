"""The embedding and the projection to logits with a table from a GGUF file.

The embedding reads few rows at a time, so its blocks stay where the file is mapped: workers of one host share them. The
product with all rows reads a packed copy, which a tied model makes of the same table. A table in a floating-point type
is looked up there as well where that is the model's type and the product does not read it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf.blocks import FLOATS, Type, dequantized
from vllm_backplane.gguf.lazy_tensor import StoredTensor
from vllm_backplane.layers.embedding import BackplaneEmbeddingMethod
from vllm_backplane.layers.linear import refuse_loading
from vllm_backplane.quantization.gguf.blocks import Run, install, values
from vllm_backplane.quantization.gguf.linear import GgufLinearMethod


class GgufTableMethod(QuantizeMethodBase):
    """Of the embedding. `multiplied`: it is the head as well."""

    def __init__(self, prefix: str, *, multiplied: bool) -> None:
        self._prefix = prefix
        self._multiplied = multiplied
        self._looked_up = True
        self._runs: list[Run] = []
        self._kind: Type | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_extra_weight_attrs: Any,
    ) -> None:
        self._rows, self._columns = sum(output_partition_sizes), input_size_per_partition
        self._dtype, self._device = params_dtype, torch.empty(0).device
        weight = torch.nn.Parameter(
            torch.empty(self._rows, input_size_per_partition, dtype=params_dtype, device="meta"), requires_grad=False
        )
        weight.weight_loader = partial(self._load, layer)  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)

    def _load(self, layer: Any, _parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        if not isinstance(loaded, StoredTensor):
            raise BackplaneError(
                f"this model changes the table of {self._prefix} before it is loaded, which blocks of a GGUF file do "
                "not allow; use the model's original checkpoint"
            )
        if loaded.shape != (layer.org_vocab_size, layer.embedding_dim):
            raise CheckpointError(
                f"the file has {tuple(loaded.shape)} weights for {self._prefix}, and its own metadata ask for "
                f"{(layer.org_vocab_size, layer.embedding_dim)}; fetch it again, or make it anew"
            )
        shard = layer.shard_indices
        rows = loaded.rows[shard.org_vocab_start_index : shard.org_vocab_end_index]
        self._kind = loaded.kind
        if self._kind in FLOATS:
            layer.weight = torch.nn.Parameter(self._values(rows).to(self._device), requires_grad=False)
            layer.weight.weight_loader = refuse_loading  # the mapping cannot be written to
            layer.quant_method = BackplaneEmbeddingMethod()
            return
        if self._multiplied:
            self._runs = install(layer, [(self._kind, rows)], self._dtype, self._device, self._rows)
        if self._looked_up:
            name = "blocks" if self._multiplied else "weight"
            setattr(layer, name, torch.nn.Parameter(rows.to(self._device), requires_grad=False))

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._kind is not None
        if FLOATS[self._kind] == self._dtype and len(rows) == self._rows and not self._multiplied:
            return rows.view(self._dtype)
        table = torch.zeros(self._rows, self._columns, dtype=self._dtype, device="cpu")
        return values([(self._kind, rows)], self._dtype, table)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self._kind is None:
            raise CheckpointError(f"the file has no weights for {self._prefix}; choose a complete one")

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        assert self._kind is not None
        blocks = layer.blocks if self._multiplied else layer.weight
        found = dequantized(blocks[input_.flatten()], self._kind)
        return found.to(self._dtype).view(*input_.shape, found.shape[-1])

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._runs:
            raise BackplaneError(
                f"{self._prefix} is used as the projection to logits, and the model's configuration says it is not; "
                "use the model's original checkpoint"
            )
        return GgufLinearMethod.multiply(layer, self._runs, x, bias)


class GgufHeadMethod(GgufTableMethod):
    """Of a head: its own weights, or those of the embedding it is tied to."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, multiplied=True)
        self._looked_up = False
        self._embedding: list[Any] = []  # not a submodule

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        self._embedding = [embed_tokens]
        layer.weight = torch.nn.Parameter(torch.empty(0, device=self._device), requires_grad=False)
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not self._embedding:
            super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._embedding:
            (table,) = self._embedding
            return table.quant_method.apply(table, x, bias)
        return super().apply(layer, x, bias)
