"""Implements vLLM's LoRA adapter arithmetic (punica) with the operators `lora_shrink` and `lora_expand`.

vLLM's base class fills a buffer with the adapter slot of each token. A matrix product here reads as many entries of
that buffer as it has rows, and not as many as the last batch had tokens, so a captured graph reads the same memory at
every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from vllm_backplane import ops
from vllm_backplane.guards import guarded

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping


def _stack(weights: torch.Tensor) -> torch.Tensor:
    """Returns [slots, out, in]; vLLM stacks adapters as [slots, 1, out, in]."""
    return weights.squeeze(1) if weights.dim() == 4 else weights


@guarded(
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.__init__",
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.update_metadata",
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase._update_base_metadata",
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase._select_full_linear_output",
    why="the products read its buffers of adapter slots",
    feature="LoRA",
)
class BackplanePunicaWrapper(PunicaWrapperBase):
    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        # The parent also groups prefill tokens by adapter, and reads sizes from the device for it. No operator needs
        # these groups.
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.is_prefill = mapping.is_prefill
        self.no_lora = not any(mapping.index_mapping) and not any(mapping.prompt_mapping)

    def add_shrink(
        self,
        y: Sequence[torch.Tensor] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Computes y[i] = scale * x A_i^T. Columns of y past the rank stay unchanged."""
        if self.no_lora:
            return
        rows = x.reshape(-1, x.shape[-1])
        indices = self._token_lora_indices[: rows.shape[0]]
        for target, weights in zip(y, lora_a_stacked, strict=True):
            product = ops.lora_shrink.call(rows, _stack(weights), indices, scale)
            target.view(-1, target.shape[-1])[:, : product.shape[1]] = product.to(target.dtype)

    def add_expand(
        self,
        y: torch.Tensor,
        x: Sequence[torch.Tensor] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Adds x[i] B_i^T to the i-th slice of the columns of y."""
        if self.no_lora:
            return
        target = y.view(-1, y.shape[-1])
        indices = self._token_lora_indices[: target.shape[0]]
        offset = offset_start
        for part, weights, size in zip(x, lora_b_stacked, output_slices, strict=True):
            ops.lora_expand.call(target, part, _stack(weights), indices, offset, size, add_inputs)
            offset += size

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        if self.no_lora:
            return
        indices = self._token_lora_indices[: y.shape[0]]
        ops.lora_expand.call(y, x, _stack(lora_b_stacked), indices, 0, None, add_inputs)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds scale * x A_i^T B_i^T to the i-th slice of the columns of y. `buffer` is unused."""
        if self.no_lora:
            return
        rows, target = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        indices = self._token_lora_indices[: rows.shape[0]]
        offset = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            narrow = ops.lora_shrink.call(rows, _stack(a), indices, scale)
            ops.lora_expand.call(target, narrow, _stack(b), indices, offset, size, True)
            offset += size

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds scale * x A^T B^T to y. Rows are sampled positions; the two vocabularies may be padded differently."""
        if self.no_lora:
            return
        rows, target = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        indices = self._sampler_indices[: rows.shape[0]]
        narrow = ops.lora_shrink.call(rows, _stack(lora_a_stacked), indices, scale)
        ops.lora_expand.call(target, narrow, _stack(lora_b_stacked), indices, 0, None, True)

    def apply_lora_full_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weight_stacked: torch.Tensor,
        bias_stacked: torch.Tensor,
        module_enabled: torch.Tensor,
    ) -> None:
        """Writes x W^T + bias to the rows of y whose adapter replaces the whole layer."""
        if self.no_lora:
            return
        replaced = ops.lora_shrink.call(x, _stack(weight_stacked), self._sampler_indices[: x.shape[0]], 1.0)
        y.copy_(self._select_full_linear_output(y, replaced, bias_stacked, module_enabled))
