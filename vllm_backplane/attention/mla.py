"""Attention over a latent (MLA: DeepSeek and its kin), on the operators `kv_cache_write` and `paged_attention`.

The cache holds one row per token: the latent of which all heads' keys and values are projections, and the part of the
key that carries the position. vLLM's layer can fold those projections into the query and the output; then attention is
that of many query heads on one key head, whose values are the front of its keys. vLLM does so for decoding and expands
the latent for prompts, with kernels of CUDA. Here every token goes the first way, so there is one kind of attention,
which the device's own kernel computes, and prompts may come in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_backplane import ops
from vllm_backplane.attention.metadata import BackplaneAttentionMetadata
from vllm_backplane.errors import BackplaneError


@dataclass(frozen=True, slots=True)
class LatentMetadata(AttentionMetadata):
    """As vLLM's layer reads it: a batch of nothing but decoding."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: BackplaneAttentionMetadata
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_prefills: int = 0
    prefill: None = None


class LatentMetadataBuilder(AttentionMetadataBuilder[LatentMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract upstream
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LatentMetadata:
        common = common_attn_metadata
        batch = BackplaneAttentionMetadata.of(common, causal=True)
        return LatentMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            decode=batch,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
        )


class BackplaneLatentImpl(MLAAttentionImpl[LatentMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        kv_lora_rank: int,
        **_others: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER or alibi_slopes or logits_soft_cap or kv_sharing_target_layer_name:
            raise BackplaneError(
                "attention over a latent is supported for decoders without ALiBi, soft caps or shared caches; choose "
                "another model"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        self.latent = kv_lora_rank

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if kv_cache.numel() == 0:  # before there is a cache: a profiling run
            return
        rows = kv_cache.unsqueeze(1)
        latent = kv_c_normed.view(-1, 1, self.latent)
        ops.kv_cache_write.call(
            latent, k_pe, rows[..., : self.latent], rows[..., self.latent :], slot_mapping.flatten(), 1.0, 1.0
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        rows = kv_c_and_k_pe_cache.unsqueeze(1)
        output = torch.empty((*query.shape[:2], self.latent), dtype=query.dtype, device=query.device)
        ops.paged_attention.call(
            query,
            rows,
            rows[..., : self.latent],
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            self.scale,
            True,
            self.sliding_window,
            0.0,
            None,
            None,
            1.0,
            1.0,
            output,
        )
        return output, None


class BackplaneLatentBackend(AttentionBackend):
    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[BackplaneLatentImpl]:
        return BackplaneLatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        return LatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class NoPrefill(MLAPrefillBackend):
    """vLLM makes one for each layer. No token here goes that way."""

    supported_dtypes: ClassVar[list[torch.dtype]] = BackplaneLatentBackend.supported_dtypes

    @staticmethod
    def get_name() -> str:
        return "BACKPLANE"

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise self._unexpected()

    def run_prefill_context_chunk(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise self._unexpected()

    def _unexpected(self) -> BackplaneError:
        return BackplaneError(
            "vLLM expanded the latent of a prompt, which Backplane does not do; install a vLLM this version of "
            "vllm-backplane supports ('vllm-backplane doctor' names them)"
        )
