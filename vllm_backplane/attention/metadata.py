"""Builds the attention metadata of a batch, once per scheduler step for all layers of a KV cache group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from vllm_backplane.errors import BackplaneError
from vllm_backplane.guards import guarded


@dataclass(slots=True)
class BackplaneAttentionMetadata(AttentionMetadata):
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: bool
    slot_mapping: torch.Tensor | None = None
    """KV cache slots of the encoder's tokens. vLLM sets it for cross-attention, because the decoder has other slots."""

    @classmethod
    def from_common(cls, common: CommonAttentionMetadata, *, causal: bool) -> BackplaneAttentionMetadata:
        """Returns the metadata of the requests in the batch, without vLLM's padding."""
        return cls(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor[: common.num_reqs],
            causal=causal,
        )


@guarded(
    "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
    why="it reads which batches are captured, which is set here",
)
class BackplaneMetadataBuilder(AttentionMetadataBuilder[BackplaneAttentionMetadata]):
    """Builds the metadata of a step, which all layers of a KV cache group share. vLLM calls it for each group."""

    # Replay is safe: every tensor is a view of a persistent buffer, and the operators read lengths from tensors.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):  # type: ignore[no-untyped-def]
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.is_cross_attention = isinstance(kv_cache_spec, CrossAttentionSpec)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BackplaneAttentionMetadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise BackplaneError(
                "a batch mixes causal and non-causal requests, which Backplane's attention does not support; set "
                "--max-num-seqs 1"
            )
        return BackplaneAttentionMetadata.from_common(common, causal=common.causal and not self.is_cross_attention)
