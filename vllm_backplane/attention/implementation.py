"""Computes the attention of one layer with the operators `kv_cache_write`, `paged_attention` and `varlen_attention`.

vLLM calls `do_kv_cache_update` before `forward`, so a device may overlap or fuse the two. The KV cache of a layer is
one tensor, ``[blocks, kv_heads, block_size, 2 * head]``, keys first. Its strides are read from the tensor.
"""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_backplane import ops
from vllm_backplane.attention.metadata import BackplaneAttentionMetadata
from vllm_backplane.errors import BackplaneError
from vllm_backplane.guards import guarded

_FP8_STORAGE = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_ENCODER = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


class BackplaneAttentionImpl(AttentionImpl[BackplaneAttentionMetadata]):
    """Computes the attention of one layer with the operator `paged_attention`. vLLM creates one for each layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window or 0
        self.soft_cap = float(logits_soft_cap or 0.0)
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._alibi_slopes_list = alibi_slopes
        self.alibi_slopes: torch.Tensor | None = None
        if self.num_heads % self.num_kv_heads:
            raise BackplaneError(
                f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads; choose a "
                "--tensor-parallel-size that divides both, or correct the model's configuration"
            )
        if sinks is not None and sinks.shape[0] != num_heads:
            raise BackplaneError(
                f"the checkpoint has {sinks.shape[0]} attention sinks for {num_heads} heads, which does not match its "
                "configuration; choose another checkpoint"
            )
        self._storage: torch.dtype | None = None
        if is_quantized_kv_cache(kv_cache_dtype):
            try:
                self._storage = _FP8_STORAGE[kv_cache_dtype]
            except KeyError:
                raise BackplaneError(
                    f"KV cache dtype {kv_cache_dtype!r} is not supported; choose among auto, " + ", ".join(_FP8_STORAGE)
                ) from None

    def _split_cache(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the keys and of the values in the cache."""
        if self._storage is not None and kv_cache.dtype != self._storage:
            kv_cache = kv_cache.view(self._storage)
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]

    @guarded(
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales",
        why="it names the scales of a quantized KV cache",
    )
    def _scales(self, layer: AttentionLayer) -> tuple[float, float]:
        """Returns the scales of keys and values; they are 1 unless the cache is quantized.

        vLLM leaves stale scales on layers whose cache is not quantized.
        """
        if self._storage is None:
            return 1.0, 1.0
        return layer._k_scale_float, layer._v_scale_float

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.attn_type in _ENCODER:
            return
        key_cache, value_cache = self._split_cache(kv_cache)
        ops.kv_cache_write.call(key, value, key_cache, value_cache, slot_mapping, *self._scales(layer))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: BackplaneAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise BackplaneError(
                "Backplane's attention cannot write quantized output; disable the fusion of attention and quantization "
                "in --compilation-config (pass_config fuse_attn_quant)"
            )
        if attn_metadata is None:  # a memory-profiling run: shapes only
            return output.zero_()
        if self._alibi_slopes_list is not None and self.alibi_slopes is None:
            self.alibi_slopes = torch.tensor(self._alibi_slopes_list, dtype=torch.float32, device=query.device)
        tokens = attn_metadata.num_actual_tokens
        if self.attn_type in _ENCODER:
            ops.varlen_attention.call(
                query[:tokens],
                key[:tokens],
                value[:tokens],
                attn_metadata.query_start_loc,
                self.scale,
                False,
                self.sliding_window,
                self.soft_cap,
                self.alibi_slopes,
                self.sinks,
                output[:tokens],
            )
            return output
        key_cache, value_cache = self._split_cache(kv_cache)
        ops.paged_attention.call(
            query[:tokens],
            key_cache,
            value_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            self.scale,
            attn_metadata.causal,
            self.sliding_window,
            self.soft_cap,
            self.alibi_slopes,
            self.sinks,
            *self._scales(layer),
            output[:tokens],
        )
        return output
