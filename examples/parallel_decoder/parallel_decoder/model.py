"""Implements a decoder whose attention and MLP run in parallel: both read one norm of the residual stream.

It is built from vLLM's layers. It therefore runs on every platform of vLLM with that platform's kernels, and supports
tensor parallelism.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Maps matrices of the checkpoint to the fused matrix that contains them, and their part of it."""


class ParallelLayer(nn.Module):
    """Computes one decoder layer, with attention and MLP on the same norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quantization = vllm_config.model_config.hf_config, vllm_config.quant_config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_size, workers = config.hidden_size // heads, get_tensor_model_parallel_world_size()
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_size,
            heads,
            kv_heads,
            bias=False,
            quant_config=quantization,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * head_size, config.hidden_size, bias=False, quant_config=quantization, prefix=f"{prefix}.o_proj"
        )
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quantization,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quantization,
            prefix=f"{prefix}.down_proj",
        )
        self.activation = SiluAndMul()
        self.rotary = get_rope(
            head_size,
            max_position=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        self.sizes = [heads // workers * head_size, *[max(kv_heads // workers, 1) * head_size] * 2]
        self.attention = Attention(
            heads // workers,
            head_size,
            head_size**-0.5,
            num_kv_heads=max(kv_heads // workers, 1),
            cache_config=vllm_config.cache_config,
            quant_config=quantization,
            prefix=f"{prefix}.attention",
        )

    def forward(self, positions: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        normal = self.norm(stream)
        queries, keys, values = self.qkv_proj(normal)[0].split(self.sizes, dim=-1)
        queries, keys = self.rotary(positions, queries, keys)
        attended, _ = self.o_proj(self.attention(queries, keys, values))
        computed, _ = self.down_proj(self.activation(self.gate_up_proj(normal)[0]))
        return stream + attended + computed


class ParallelDecoderForCausalLM(nn.Module):
    """Implements the causal language model that vLLM loads and runs."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, quantization = vllm_config.model_config.hf_config, vllm_config.quant_config
        below = f"{prefix}." if prefix else ""
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            ParallelLayer(vllm_config, f"{below}layers.{number}") for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, quant_config=quantization, prefix=f"{below}lm_head"
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            stream = layer(positions, stream)
        return self.norm(stream)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads the checkpoint and returns the names of the loaded parameters; vLLM raises if one is missing."""
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            *path, module, kind = name.split(".")
            fused, part = FUSED.get(module, (module, None))
            target = ".".join([*path, fused, kind])
            load = getattr(parameters[target], "weight_loader", default_weight_loader)
            load(parameters[target], tensor, *(() if part is None else (part,)))
            loaded.add(target)
        return loaded
