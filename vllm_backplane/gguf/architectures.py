"""How the tensors of a GGUF file are called in the checkpoints vLLM loads, and what its converter did to them.

Converters reorder the rows of Q and K of Llama models, because llama.cpp rotates neighbouring features and vLLM those
half a head apart, with their biases, and add 1 to the weights of Gemma's norms. Both are undone here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm_backplane.errors import CheckpointError, nearest, shown
from vllm_backplane.gguf.model_files import Gguf, Placed

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
GATED = frozenset(_GATED)
_DENSE = {**_ATTENTION, **_GATED, "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

ALONE = "ffn_gate_inp_shexp"
"""A matrix of one row, which older converters wrote as a vector."""

_NOT_WEIGHTS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Read when the configuration is made."""


@dataclass(frozen=True, slots=True)
class Architecture:
    model_type: str
    model_class: str
    layer: Mapping[str, str]
    """Names within a layer."""
    permuted: bool = False
    """Rows of Q and K, and what is added to their products, are in llama.cpp's order."""
    norms_plus_one: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)
    """Names within a layer of what a file has for all experts together; {} is an expert's number."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Of the configuration, where files do not say it."""
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    """Names outside of layers."""
    biased: bool = False
    """Every product and every norm has a bias, the head too, and norms subtract the mean."""
    may_add: frozenset[str] = frozenset()
    """Products within a layer that may have a bias. vLLM's models pass over a bias that they do not have."""


_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_ROUTED = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {**_ROUTED, "ffn_gate_inp": "block_sparse_moe.gate"},
    permuted=True,
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
"""Its files say llama."""

_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

_PHI2 = {
    **_ATTENTION,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
PHI2 = Architecture(
    "phi",
    "PhiForCausalLM",
    _PHI2,
    defaults={"hidden_act": "gelu_new", "qk_layernorm": False},
    top={**TOP, "output_norm": "model.final_layernorm"},
    biased=True,
)
PHI2_FUSED = replace(
    PHI2,
    layer={"attn_qkv": "self_attn.qkv_proj", **{part: name for part, name in _PHI2.items() if part not in QKV}},
)
"""As the first converters wrote it, from a checkpoint that had queries, keys and values in one matrix."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _DENSE, permuted=True, may_add=QKV | GATED | {"attn_output"}),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _DENSE, may_add=QKV),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_DENSE, **_HEAD_NORMS}, may_add=QKV),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**_ROUTED, **_SHARED},
        experts=_EXPERTS,
        may_add=QKV,
        defaults={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ROUTED, **_HEAD_NORMS},
        experts=_EXPERTS,
        may_add=QKV,
        defaults={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _DENSE, norms_plus_one=True, defaults=_GEMMA),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", {**_DENSE, **_FOUR_NORMS}, norms_plus_one=True, defaults=_GEMMA
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_DENSE, **_FOUR_NORMS, **_HEAD_NORMS},
        norms_plus_one=True,
        defaults=_GEMMA,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "phi2": PHI2,
}
"""By general.architecture. Mistral's files say llama."""

IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class Named(NamedTuple):
    name: str
    """As vLLM's models expect it."""
    placed: Placed
    experts: int
    """How many experts the tensor is for, whose number goes into the name; 0: it is one weight."""
    heads: int
    """Heads whose rows, or elements of a bias, are in llama.cpp's order; 0: they are in order."""
    plus_one: bool
    row: bool
    """A matrix of one row, also where the file has a vector."""


def architecture_of(model: Gguf) -> Architecture:
    stated = model.text("general.architecture")
    if stated is None:
        raise CheckpointError(f"{model.path} does not say its architecture (general.architecture); choose another file")
    found = ARCHITECTURES.get(stated)
    if found is None:
        raise CheckpointError(
            f"{model.path} is a model of architecture {shown(stated)}, which is not served from GGUF"
            f"{nearest(stated, ARCHITECTURES)} Served: {', '.join(ARCHITECTURES)}. "
            "Use the model's original checkpoint instead."
        )
    if model.number(f"{stated}.expert_count"):
        if stated == "llama":
            return MIXTRAL
        if not found.experts:
            raise CheckpointError(
                f"{model.path} is a mixture of experts of architecture {stated!r}, which is not served from GGUF; use "
                "the model's original checkpoint"
            )
    if found is PHI2 and "blk.0.attn_qkv.weight" in model.tensors:
        return PHI2_FUSED
    return found


def named(model: Gguf) -> Iterator[Named]:
    """Every tensor under the name it has in a checkpoint."""
    architecture = architecture_of(model)
    stated = model.text("general.architecture")
    heads = model.number(f"{stated}.attention.head_count") or 0
    kv_heads = model.number(f"{stated}.attention.head_count_kv") or heads
    for name, placed in model.tensors.items():
        if name in _NOT_WEIGHTS:
            continue
        match = IN_LAYER.fullmatch(name)
        if match is None:
            top, _, kind = name.rpartition(".")
            translated = architecture.top.get(top)
            prefix = ""
        else:
            top, kind = match[2], match[3]
            translated = architecture.layer.get(top) or architecture.experts.get(top)
            prefix = f"model.layers.{match[1]}."
        added = top in architecture.may_add or (architecture.biased and top != "token_embd")
        if translated is None or kind not in ("weight", "bias") or (kind == "bias" and not added):
            raise CheckpointError(
                f"{model.path} has a tensor {name!r}, which models of architecture {stated!r} do not have here; use "
                "the model's original checkpoint"
            )
        permuted = {"attn_q": heads, "attn_k": kv_heads}.get(top, 0) if architecture.permuted else 0
        plus_one = architecture.norms_plus_one and top.endswith("norm")
        experts = 0
        if top in architecture.experts:
            experts = placed.tensor.shape[0]
            if len(placed.tensor.shape) != 3 or experts != model.number(f"{stated}.expert_count"):
                raise CheckpointError(
                    f"{model.path} has {placed.tensor.shape} for {name!r}, which is not the number of its experts; "
                    "make it anew with a current converter"
                )
        yield Named(f"{prefix}{translated}.{kind}", placed, experts, permuted, plus_one, top == ALONE)
