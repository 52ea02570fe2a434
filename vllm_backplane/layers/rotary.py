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
from vllm_backplane.guards import guarded


@guarded(
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_static",
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_native",
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase._match_cos_sin_cache_dtype",
    why="an operator computes the same from the same table",
    feature="RotaryEmbedding",
)
class BackplaneRotaryEmbedding(RotaryEmbedding):
    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        table = self._match_cos_sin_cache_dtype(query)
        ops.rotary_embedding.call(positions, query, key, table, self.head_size, self.is_neox_style)
        return query, key


@guarded(
    "vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope:DynamicNTKAlphaRotaryEmbedding",
    why="it differs from the plain class in its table only",
    feature="DynamicNTKAlphaRotaryEmbedding",
)
class BackplaneDynamicNTKAlphaRotaryEmbedding(BackplaneRotaryEmbedding, DynamicNTKAlphaRotaryEmbedding):
    pass


@guarded(
    "vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope:DynamicNTKScalingRotaryEmbedding",
    why="it differs from the plain class in its table only",
    feature="DynamicNTKScalingRotaryEmbedding",
)
class BackplaneDynamicNTKScalingRotaryEmbedding(BackplaneRotaryEmbedding, DynamicNTKScalingRotaryEmbedding):
    pass


@guarded(
    "vllm.model_executor.layers.rotary_embedding.linear_scaling_rope:LinearScalingRotaryEmbedding",
    why="it differs from the plain class in its table only",
    feature="LinearScalingRotaryEmbedding",
)
class BackplaneLinearScalingRotaryEmbedding(BackplaneRotaryEmbedding, LinearScalingRotaryEmbedding):
    pass


@guarded(
    "vllm.model_executor.layers.rotary_embedding.llama3_rope:Llama3RotaryEmbedding",
    why="it differs from the plain class in its table only",
    feature="Llama3RotaryEmbedding",
)
class BackplaneLlama3RotaryEmbedding(BackplaneRotaryEmbedding, Llama3RotaryEmbedding):
    pass


@guarded(
    "vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope:NTKScalingRotaryEmbedding",
    why="it differs from the plain class in its table only",
    feature="NTKScalingRotaryEmbedding",
)
class BackplaneNTKScalingRotaryEmbedding(BackplaneRotaryEmbedding, NTKScalingRotaryEmbedding):
    pass


@guarded(
    "vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope:YaRNScalingRotaryEmbedding",
    why="it differs from the plain class in its table only",
    feature="YaRNScalingRotaryEmbedding",
)
class BackplaneYaRNScalingRotaryEmbedding(BackplaneRotaryEmbedding, YaRNScalingRotaryEmbedding):
    pass
