"""Computes multi-head latent attention (MLA: DeepSeek and related models) on `kv_cache_write` and `paged_attention`.

The KV cache holds one row per token: the latent, from which the keys and values of all heads are projected, and the
rotary part of the key. vLLM's layer can absorb the projections into the query and the output. Attention then has many
query heads and one key head (MQA), and the values are the leading columns of the keys. vLLM uses this form for decode
only; for prefill it expands the latent with CUDA kernels. Backplane uses the absorbed form for every token. The
device's own attention kernel computes it, and chunked prefill works without further code.
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
from vllm_backplane.guards import guarded


@dataclass(frozen=True, slots=True)
class BackplaneMLAMetadata(AttentionMetadata):
    """Presents every request to vLLM's MLA layer as a decode request."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: BackplaneAttentionMetadata
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_prefills: int = 0
    prefill: None = None


@guarded(
    "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
    why="it reads which batches are captured, which is set here",
    feature="latent attention (MLA)",
)
class BackplaneMLAMetadataBuilder(AttentionMetadataBuilder[BackplaneMLAMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract upstream
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> BackplaneMLAMetadata:
        common = common_attn_metadata
        batch = BackplaneAttentionMetadata.from_common(common, causal=True)
        return BackplaneMLAMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            decode=batch,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
        )


@guarded(
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention.__init__",
    why="it marks the weights that must keep their order (_cpu_skip_gemm_dispatch)",
    feature="latent attention (MLA)",
)
class BackplaneMLAImpl(MLAAttentionImpl[BackplaneMLAMetadata]):
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
        **_ignored: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER or alibi_slopes or logits_soft_cap or kv_sharing_target_layer_name:
            raise BackplaneError(
                "latent attention (MLA) is supported for decoders without ALiBi, soft caps or shared KV caches; choose "
                "another model"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        self.latent_size = kv_lora_rank

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,  # since vLLM 0.33: the scale is 1, which it always is here
    ) -> None:
        if kv_cache.numel() == 0:  # a memory-profiling run, before the cache exists
            return
        rows = kv_cache.unsqueeze(1)
        latent = kv_c_normed.view(-1, 1, self.latent_size)
        ops.kv_cache_write.call(
            latent, k_pe, rows[..., : self.latent_size], rows[..., self.latent_size :], slot_mapping.flatten(), 1.0, 1.0
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: BackplaneMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        rows = kv_c_and_k_pe_cache.unsqueeze(1)
        output = torch.empty((*query.shape[:2], self.latent_size), dtype=query.dtype, device=query.device)
        ops.paged_attention.call(
            query,
            rows,
            rows[..., : self.latent_size],
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


class BackplaneMLABackend(AttentionBackend):
    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[BackplaneMLAImpl]:
        return BackplaneMLAImpl

    @staticmethod
    def get_builder_cls() -> type[BackplaneMLAMetadataBuilder]:
        return BackplaneMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class UnusedMLAPrefillBackend(MLAPrefillBackend):
    """Fills the place of the prefill backend that vLLM constructs for each MLA layer. Its methods raise, because no
    token is a prefill token here."""

    supported_dtypes: ClassVar[list[torch.dtype]] = BackplaneMLABackend.supported_dtypes

    @staticmethod
    def get_name() -> str:
        return "BACKPLANE"

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise self._unexpected()

    def run_prefill_context_chunk(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise self._unexpected()

    def _unexpected(self) -> BackplaneError:
        return BackplaneError(
            "vLLM called the MLA prefill path, which Backplane does not have; install a vLLM that this version of "
            "vllm-backplane supports ('vllm-backplane doctor' names them)"
        )
