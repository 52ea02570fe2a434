"""Replaces vLLM's rotary embeddings by subclasses that call the operator `rotary_embedding` in place.

The scaled variants differ from the plain class only in their cos/sin table. vLLM looks replacements up by class name,
so each variant has a subclass of its own. Variants with their own forward method (multimodal, DeepSeek, Fourier) keep
vLLM's native implementation.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import DynamicNTKAlphaRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import DynamicNTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from vllm_backplane import ops


class BackplaneRotaryEmbedding(RotaryEmbedding):
    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        table = self._match_cos_sin_cache_dtype(query)
        ops.rotary_embedding.call(positions, query, key, table, self.head_size, self.is_neox_style)
        return query, key


class BackplaneDynamicNTKAlphaRotaryEmbedding(BackplaneRotaryEmbedding, DynamicNTKAlphaRotaryEmbedding):
    pass


class BackplaneDynamicNTKScalingRotaryEmbedding(BackplaneRotaryEmbedding, DynamicNTKScalingRotaryEmbedding):
    pass


class BackplaneLinearScalingRotaryEmbedding(BackplaneRotaryEmbedding, LinearScalingRotaryEmbedding):
    pass


class BackplaneLlama3RotaryEmbedding(BackplaneRotaryEmbedding, Llama3RotaryEmbedding):
    pass


class BackplaneNTKScalingRotaryEmbedding(BackplaneRotaryEmbedding, NTKScalingRotaryEmbedding):
    pass


class BackplaneYaRNScalingRotaryEmbedding(BackplaneRotaryEmbedding, YaRNScalingRotaryEmbedding):
    pass
