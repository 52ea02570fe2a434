"""Declares the operators that a device may implement, one file per family; importing this package declares them all.

It imports nothing of vLLM. `layers/`, `attention/`, `quantization/`, `runner/`, `lora/`, `worker/` and `binding/ir.py`
call the operators; `vllm-backplane ops` lists the callers of each.
"""

from vllm_backplane.ops.activations import (
    fatrelu_and_mul,
    gelu,
    gelu_and_mul,
    gelu_fast,
    gelu_new,
    mul_and_silu,
    quick_gelu,
    relu2,
    silu_and_mul,
    silu_and_mul_with_clamp,
    swigluoai_and_mul,
)
from vllm_backplane.ops.attention import paged_attention, varlen_attention
from vllm_backplane.ops.embedding import embedding, logits
from vllm_backplane.ops.kv_cache import kv_cache_write, kv_cache_zero_blocks
from vllm_backplane.ops.linear import blocked_linear, linear
from vllm_backplane.ops.lora import lora_expand, lora_shrink
from vllm_backplane.ops.moe import moe_experts, moe_route
from vllm_backplane.ops.norms import fused_add_gemma_rms_norm, fused_add_rms_norm, gemma_rms_norm, rms_norm
from vllm_backplane.ops.quantized_linear import quantized_linear
from vllm_backplane.ops.recurrence import causal_convolution, gated_delta_rule, selective_scan
from vllm_backplane.ops.rejection import (
    expand_to_tokens,
    rejection_greedy_sample,
    rejection_random_sample,
    sample_recovered_tokens,
)
from vllm_backplane.ops.rotary import rotary_embedding
from vllm_backplane.ops.sampling import (
    allowed_tokens_mask,
    apply_penalties,
    greedy_argmax,
    min_p_mask,
    sample_by_race,
    top_k_top_p_mask,
)
from vllm_backplane.ops.slot_mapping import compute_slot_mapping
from vllm_backplane.ops.speculation import (
    copy_and_expand_dflash_inputs,
    copy_and_expand_eagle_inputs,
    eagle_prepare_inputs_padded,
    eagle_prepare_next_token_padded,
    eagle_step_slot_mapping_metadata,
)
from vllm_backplane.ops.tally import tally_values

__all__ = [
    "allowed_tokens_mask",
    "apply_penalties",
    "blocked_linear",
    "causal_convolution",
    "compute_slot_mapping",
    "copy_and_expand_dflash_inputs",
    "copy_and_expand_eagle_inputs",
    "eagle_prepare_inputs_padded",
    "eagle_prepare_next_token_padded",
    "eagle_step_slot_mapping_metadata",
    "embedding",
    "expand_to_tokens",
    "fatrelu_and_mul",
    "fused_add_gemma_rms_norm",
    "fused_add_rms_norm",
    "gated_delta_rule",
    "gelu",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gemma_rms_norm",
    "greedy_argmax",
    "kv_cache_write",
    "kv_cache_zero_blocks",
    "linear",
    "logits",
    "lora_expand",
    "lora_shrink",
    "min_p_mask",
    "moe_experts",
    "moe_route",
    "mul_and_silu",
    "paged_attention",
    "quantized_linear",
    "quick_gelu",
    "rejection_greedy_sample",
    "rejection_random_sample",
    "relu2",
    "rms_norm",
    "rotary_embedding",
    "sample_by_race",
    "sample_recovered_tokens",
    "selective_scan",
    "silu_and_mul",
    "silu_and_mul_with_clamp",
    "swigluoai_and_mul",
    "tally_values",
    "top_k_top_p_mask",
    "varlen_attention",
]
