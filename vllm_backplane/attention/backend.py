"""Declares Backplane's attention backend to vLLM: supported types, block sizes and features."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_backplane.attention.implementation import BackplaneAttentionImpl
from vllm_backplane.attention.metadata import BackplaneMetadataBuilder


class BackplaneAttentionBackend(AttentionBackend):
    """Names the classes of Backplane's attention for vLLM, and what they support."""

    forward_includes_kv_cache_update = False
    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[BackplaneAttentionImpl]:
        return BackplaneAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[BackplaneMetadataBuilder]:
        return BackplaneMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER,
            AttentionType.ENCODER_ONLY,
            AttentionType.ENCODER_DECODER,
        )

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True
