"""Maps the tensor names of a GGUF file to those of a Hugging Face checkpoint, and records what the converter changed.

Converters reorder the rows of Q and K of Llama models, and the elements of their biases, because llama.cpp rotates
neighbouring features and vLLM rotates features half a head apart. They also add 1 to the weights of Gemma's norms.
`CheckpointTensor` records both changes, and `lazy_tensor` undoes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm_backplane.errors import CheckpointError, nearest, short_repr
from vllm_backplane.gguf.model_files import GgufModel, TensorLocation

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

SINGLE_ROW = "ffn_gate_inp_shexp"
"""The matrix of one row that older converters wrote as a vector."""

_NOT_WEIGHTS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that the configuration is made from (`configuration`); models do not load them."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes how files of one architecture name their tensors, and which Hugging Face model they are."""

    model_type: str
    model_class: str
    layer: Mapping[str, str]
    """Checkpoint names of tensors within a layer, by their GGUF names."""
    permuted: bool = False
    """Whether the rows of Q and K, and the elements of their biases, are in llama.cpp's order."""
    norms_plus_one: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint names of tensors that hold all experts of a layer; {} stands for the number of the expert."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Entries of the configuration that files do not contain."""
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    """Checkpoint names of tensors outside of layers, by their GGUF names."""
    biased: bool = False
    """Whether every linear layer, the LM head and every norm have a bias; such norms also subtract the mean."""
    optional_biases: frozenset[str] = frozenset()
    """Linear layers that may have a bias. vLLM's models silently skip a bias that they have no parameter for."""


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
"""Mixtral, whose files have "llama" as their general.architecture."""

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
"""Phi-2 as the first converters wrote it, from a checkpoint that had queries, keys and values in one matrix."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _DENSE, permuted=True, optional_biases=QKV | GATED | {"attn_output"}
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _DENSE, optional_biases=QKV),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_DENSE, **_HEAD_NORMS}, optional_biases=QKV),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**_ROUTED, **_SHARED},
        experts=_EXPERTS,
        optional_biases=QKV,
        defaults={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ROUTED, **_HEAD_NORMS},
        experts=_EXPERTS,
        optional_biases=QKV,
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
"""Served architectures by general.architecture. Mistral's files have "llama" there."""

IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class CheckpointTensor(NamedTuple):
    """Describes a tensor of the file under its checkpoint name, and the converter's changes that must be undone."""

    name: str
    """The name that vLLM's models expect."""
    location: TensorLocation
    experts: int
    """Number of experts that the tensor holds; `name` has a {} for the expert's number. 0: it is a single weight."""
    permuted_heads: int
    """Number of heads whose rows, or elements of a bias, are in llama.cpp's order. 0: nothing was reordered."""
    plus_one: bool
    """Whether the converter added 1 to every value."""
    single_row: bool
    """Whether models expect a matrix of one row, even where the file has a vector."""


def architecture_of(model: GgufModel) -> Architecture:
    """Returns the architecture of a file. Raises `CheckpointError` where it is missing or not served."""
    name = model.text("general.architecture")
    if name is None:
        raise CheckpointError(
            f"{model.path} has no architecture in its metadata (general.architecture); use another file"
        )
    found = ARCHITECTURES.get(name)
    if found is None:
        raise CheckpointError(
            f"{model.path} is a model of architecture {short_repr(name)}, which is not served from GGUF"
            f"{nearest(name, ARCHITECTURES)} Served: {', '.join(ARCHITECTURES)}. "
            "Use the model's original checkpoint instead."
        )
    if model.number(f"{name}.expert_count"):
        if name == "llama":
            return MIXTRAL
        if not found.experts:
            raise CheckpointError(
                f"{model.path} is a mixture of experts of architecture {name!r}, which is not served from GGUF; use "
                "the model's original checkpoint"
            )
    if found is PHI2 and "blk.0.attn_qkv.weight" in model.tensors:
        return PHI2_FUSED
    return found


def checkpoint_tensors(model: GgufModel) -> Iterator[CheckpointTensor]:
    """Yields every weight of the model under its checkpoint name."""
    architecture = architecture_of(model)
    family = model.text("general.architecture")
    heads = model.number(f"{family}.attention.head_count") or 0
    kv_heads = model.number(f"{family}.attention.head_count_kv") or heads
    for name, location in model.tensors.items():
        if name in _NOT_WEIGHTS:
            continue
        match = IN_LAYER.fullmatch(name)
        if match is None:
            part, _, kind = name.rpartition(".")
            translated = architecture.top.get(part)
            prefix = ""
        else:
            part, kind = match[2], match[3]
            translated = architecture.layer.get(part) or architecture.experts.get(part)
            prefix = f"model.layers.{match[1]}."
        may_have_bias = part in architecture.optional_biases or (architecture.biased and part != "token_embd")
        if translated is None or kind not in ("weight", "bias") or (kind == "bias" and not may_have_bias):
            raise CheckpointError(
                f"{model.path} has a tensor {name!r}, which is not part of architecture {family!r} as it is served "
                "here; use the model's original checkpoint"
            )
        permuted_heads = {"attn_q": heads, "attn_k": kv_heads}.get(part, 0) if architecture.permuted else 0
        plus_one = architecture.norms_plus_one and part.endswith("norm")
        experts = 0
        if part in architecture.experts:
            experts = location.tensor.shape[0]
            if len(location.tensor.shape) != 3 or experts != model.number(f"{family}.expert_count"):
                raise CheckpointError(
                    f"{model.path}: the shape {location.tensor.shape} of {name!r} does not match the number of experts "
                    f"({family}.expert_count); convert the model again with a current converter"
                )
        yield CheckpointTensor(
            f"{prefix}{translated}.{kind}", location, experts, permuted_heads, plus_one, part == SINGLE_ROW
        )
