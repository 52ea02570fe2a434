"""Implements attention whose kernels take blocks of eight tokens only, as an extension that a worker loads.

vLLM splits larger blocks of the KV cache for them, and computes the block tables that they see in every step.
"""

from __future__ import annotations

from typing import Any

from vllm_backplane.attention import selection
from vllm_backplane.attention.backend import BackplaneAttentionBackend


class SmallBlocksBackend(BackplaneAttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [8]


class Extension:
    """Adds nothing to the worker; its module is what is loaded."""


selection.BACKEND = f"{__name__}.SmallBlocksBackend"
