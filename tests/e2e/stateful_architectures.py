"""Defines tiny models with latent attention (MLA), recurrent states, or shared experts."""

from __future__ import annotations

from typing import Any

from model_spec import COMMON, Architecture, fill

FORGET_AT_ONCE = 6.0
"""Logarithm of a decay rate so high that the recurrent state is lost after one token."""


def _without_positions_in_keys(model: Any) -> None:
    """Sets the projection of the rotated part of the keys, which is stored beside the latent, to zero."""
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight[-model.config.qk_rope_head_dim :].zero_()


def _small(part: str) -> Any:
    """Returns a function that makes the embeddings small compared with what the layers add.

    Otherwise a model with few layers would only repeat its last token.
    """

    def apply(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.mul_(0.2)

    return apply


LATENTS_AND_STATES: dict[str, Architecture] = {
    "Qwen-MoE": Architecture(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            **COMMON,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
        },
        switch_off=fill("shared_expert.down_proj", 0.0),
        seed=1,
    ),
    "MLA (DeepSeek)": Architecture(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **COMMON,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "topk_method": "noaux_tc",  # vLLM requires these two values; transformers supports no others
            "scoring_func": "sigmoid",
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
        switch_off=_without_positions_in_keys,
        seed=2,
    ),
    "Mamba": Architecture(
        "MambaConfig",
        "MambaForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "state_size": 16,
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        adjust=_small("embeddings"),
        switch_off=fill("A_log", FORGET_AT_ONCE),
        seed=1,
    ),
    "Mamba2": Architecture(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,  # transformers normalizes all groups together, vLLM each group separately
            "state_size": 16,
            "chunk_size": 16,
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        adjust=_small("embeddings"),
        switch_off=fill("A_log", FORGET_AT_ONCE),
        seed=4,
    ),
    "a hybrid of Mamba and attention": Architecture(
        "JambaConfig",
        "JambaForCausalLM",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        switch_off=fill("A_log", FORGET_AT_ONCE),
        seed=1,
    ),
    "gated delta net (Qwen-Next)": Architecture(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        switch_off=fill("A_log", FORGET_AT_ONCE),
        seed=0,
    ),
}
"""The models, by their names in docs/features.toml."""
