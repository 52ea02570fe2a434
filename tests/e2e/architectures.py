"""Defines tiny models of several architectures, each of which tests one feature of attention, norms or experts."""

from __future__ import annotations

from typing import Any

import torch
from model_spec import COMMON, Architecture, fill, scale
from stateful_architectures import LATENTS_AND_STATES


def _without_alibi(model: Any) -> None:
    """Removes ALiBi: replaces the slopes, which transformers builds in the forward pass, by zeros."""
    model.transformer.build_alibi_tensor = lambda mask, heads, dtype: torch.zeros(
        mask.shape[0] * heads, 1, mask.shape[1], dtype=dtype
    )


def _gemma2_adjust(model: Any) -> None:
    """Makes the tied embeddings small compared with what the layers add.

    Otherwise the model only repeats its last token.
    """
    model.model.embed_tokens.weight.mul_(0.1)
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.mul_(4.0)
        elif "post_" in name and "layernorm" in name:
            parameter.add_(3.0)


def _bloom_adjust(model: Any) -> None:
    """Makes the tied embeddings small by the norm that follows them, sets biases to zero, and makes GELU exact.

    With other biases, all tokens would have nearly the same hidden states. vLLM's BLOOM computes GELU exactly, and that
    of transformers computes the tanh approximation, which changes log-probabilities by a thousandth.
    """
    for layer in model.transformer.h:
        layer.mlp.gelu_impl = torch.nn.GELU()
    model.transformer.word_embeddings_layernorm.weight.mul_(0.3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "query_key_value" in name:
            parameter.mul_(2.0)


ARCHITECTURES: dict[str, Architecture] = {
    "Qwen2: biases of Q, K and V": Architecture(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        COMMON,
        adjust=scale("_proj.bias", 5.0),
        switch_off=fill("_proj.bias", 0.0),
        seed=16,
    ),
    "Mistral: a window shorter than the prompt": Architecture(
        "MistralConfig",
        "MistralForCausalLM",
        {**COMMON, "sliding_window": 12, "head_dim": 32},
        off={"sliding_window": None},
        seed=5,
    ),
    "Gemma2: soft caps": Architecture(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **COMMON,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": True,
        },
        adjust=_gemma2_adjust,
        off={"attn_logit_softcapping": None},
        seed=3,
    ),
    "Gemma2: every second layer sees a window": Architecture(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **COMMON,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        adjust=_gemma2_adjust,
        off={"sliding_window": 512},
        seed=2,
    ),
    "GPT-2: LayerNorm, GELU, learned positions": Architecture(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": 512,
            "n_embd": 128,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 512,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        switch_off=fill("wpe", 0.0),
        seed=3,
    ),
    "OPT: ReLU, positions with an offset": Architecture(
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        switch_off=fill("embed_positions", 0.0),
        seed=2,
    ),
    "Mixtral: two experts of four": Architecture(
        "MixtralConfig",
        "MixtralForCausalLM",
        {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        off={"num_experts_per_tok": 1},
        seed=1,
    ),
    "BLOOM: ALiBi": Architecture(
        "BloomConfig",
        "BloomForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "n_layer": 3,
            "n_head": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        adjust=_bloom_adjust,
        switch_off=_without_alibi,
    ),
    "GPT-OSS: sinks": Architecture(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **COMMON,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
        adjust=fill("sinks", 2.0),
        switch_off=fill("sinks", -1e9),
        seed=9,
    ),
    **LATENTS_AND_STATES,
}
"""All tiny models, by their names in docs/features.toml."""
