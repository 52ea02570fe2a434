"""Writes tiny models as GGUF files with the gguf package, in the way of llama.cpp's converter.

Tensor names come from the table of the gguf package, so they do not depend on Backplane's code. As in llama.cpp, the
rows of Llama's Q and K are reordered, and 1 is added to Gemma's norms. The transformers model that is returned has the
weights of the file, after their quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from architectures import _gemma2_adjust
from model_spec import COMMON
from tiny_models import randomize

Type = gguf.GGMLQuantizationType
K_TYPES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
"""Byte offsets of the float16 numbers in a block. The gguf package cannot quantize to these types, so their blocks are
filled with random bytes."""
WIDE = {**COMMON, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Configuration of a model whose rows have whole blocks of 256 weights."""


@dataclass(frozen=True)
class Tiny:
    """Describes a tiny model, and how it is stored in a GGUF file."""

    config: str
    """Class of the configuration in transformers."""
    model: str
    """Class of the model in transformers."""
    architecture: str
    """Value of general.architecture in the file."""
    arguments: dict[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata in addition to those of all models. The keys do not have the prefix of the architecture."""
    adjust: Callable[[Any], None] = lambda _model: None
    """Function that changes the random weights before they are stored."""
    types: tuple[Any, ...] = (Type.F32,)
    """Types of the matrices. Consecutive matrices cycle through them."""
    seed: int = 0
    workers: int = 1
    """Tensor parallel size with which the model is served."""
    fused: bool = False
    """Whether the file has Q, K and V in one matrix, although transformers has three."""

    @property
    def rounded(self) -> bool:
        """Returns whether the inputs of the model's matrix products are rounded to 8 bits."""
        return self.types != (Type.F32,)

    def write(self, path: Path, tensors_per_part: int = 0) -> Any:
        """Writes the file, or its parts, and returns the transformers model with the weights of the file."""
        import transformers

        config = getattr(transformers, self.config)(**self.arguments)
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model)(config).eval().float()
        randomize(model, seed=self.seed)
        with torch.no_grad():
            self.adjust(model)
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=tensors_per_part)
        _describe(writer, config, self.metadata, self.architecture)
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(numbers[self.architecture], config.num_hidden_layers)
        matrices = 0
        for name, parts in _stored(model.state_dict(), self):
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = self._converted(name, torch.cat(parts), config)
            kind = Type.F32
            if values.dim() > 1 and not name.endswith(".gate.weight"):  # llama.cpp keeps routers in float32
                kind = self.types[matrices % len(self.types)]
                matrices += 1
            raw = _blocks(values.numpy(), kind, seed=matrices)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), raw, raw_dtype=kind)
            held = torch.from_numpy(gguf.dequantize(raw, kind).reshape(values.shape).copy())
            back = self._converted(name, held, config, back=True)
            for part, own in zip(parts, back.split([len(part) for part in parts]), strict=True):
                part.copy_(own)
        if config.rope_parameters.get("rope_type") == "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_factors(config.rope_parameters, config.head_dim))
        for kind in ("long", "short"):
            if factors := config.rope_parameters.get(f"{kind}_factor"):
                writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return model

    def _converted(self, name: str, tensor: torch.Tensor, config: Any, *, back: bool = False) -> torch.Tensor:
        if self.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            half = tensor.shape[0] // heads // 2
            shape = (heads, half, 2) if back else (heads, 2, half)
            return tensor.reshape(*shape, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            return tensor - 1 if back else tensor + 1
        return tensor


def _stored(state: Mapping[str, torch.Tensor], tiny: Tiny) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields the name of each tensor in the file, with the tensors of transformers that it concatenates.

    The tensors are views of the model's parameters, so the caller can write into them.
    """
    for name, tensor in _separate(state, tiny.architecture):
        if tiny.fused and ".self_attn.q_proj." in name:
            yield name.replace("q_proj", "qkv_proj"), [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        elif not tiny.fused or not any(f".self_attn.{part}_proj." in name for part in "kv"):
            yield name, [tensor]


def _separate(state: Mapping[str, torch.Tensor], architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the model, with the gate and up projections of experts as separate views.

    transformers has both projections in one tensor, and GGUF files have two tensors.
    """
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        parts = {}
        if last == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            parts = {"gate_proj": gate, "up_proj": up}
        elif last == "down_proj":
            parts = {"down_proj": tensor}
        if not parts:
            yield name, tensor
        for part, one in parts.items():
            mixtral = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part]
            layer = path.split(".")[2]
            known = f"layers.{layer}.feed_forward.experts.{mixtral}" if architecture == "llama" else f"{path}.{part}"
            yield f"{known}.weight", one


def _describe(writer: Any, config: Any, metadata: Mapping[str, Any], architecture: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture == "phi2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    positions = config.rope_parameters
    writer.add_rope_freq_base(positions.get("full_attention", positions)["rope_theta"])
    writer.add_tokenizer_model("none")
    for key, value in metadata.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_string if isinstance(value, str) else None
        (add or writer.add_float32)(f"{architecture}.{key}", value)


def _blocks(values: np.ndarray, kind: Any, seed: int) -> np.ndarray:
    if kind not in K_TYPES and kind != Type.IQ4_NL:
        return gguf.quantize(np.ascontiguousarray(values), kind)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (values.size // per_block, size), dtype=np.uint8)
    for place in K_TYPES.get(kind, (0,)):
        raw[:, place : place + 2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    raw = raw.reshape(*values.shape[:-1], -1)
    # Scaled to the magnitude of the weights that they replace.
    factor = float(values.std() / gguf.dequantize(raw, kind).std())
    flat = raw.reshape(-1, size)
    for place in K_TYPES.get(kind, (0,)):
        flat[:, place : place + 2] = np.frombuffer(np.float16(1e-3 * factor).tobytes(), np.uint8)
    return raw


def _llama3_factors(scaling: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Returns the frequency factors of Llama 3.1 by wavelength, as published.

    Short wavelengths keep their frequency, long ones are stretched by the factor, and the ones between are
    interpolated.
    """
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
    factors = []
    for wavelength in 2 * np.pi * scaling["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim):
        ramp = (original / wavelength - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        between = 1 / ((1 - ramp) / factor + ramp)
        factors.append(1.0 if wavelength < high else factor if wavelength > low else between)
    return np.array(factors, np.float32)


_WINDOWED = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 12}

PHI2 = Tiny(
    "PhiConfig",
    "PhiForCausalLM",
    "phi2",
    {**COMMON, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    {"rope.dimension_count": 16},
    types=(Type.Q4_0, Type.Q8_0),
)
"""A model with LayerNorm, biases and partial rotary embeddings."""
MODELS: dict[str, Tiny] = {
    "Llama 3.1, tied, biased": Tiny(
        "LlamaConfig",
        "LlamaForCausalLM",
        "llama",
        {
            **COMMON,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "Qwen2": Tiny("Qwen2Config", "Qwen2ForCausalLM", "qwen2", COMMON),
    "Qwen3": Tiny(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        "qwen3",
        {**COMMON, "head_dim": 64},
        {"attention.key_length": 64, "attention.value_length": 64},
    ),
    "Gemma": Tiny(
        "GemmaConfig",
        "GemmaForCausalLM",
        "gemma",
        {**COMMON, "head_dim": 32, "tie_word_embeddings": True},
        {"attention.key_length": 32, "attention.value_length": 32},
        adjust=_gemma2_adjust,
        types=(Type.Q8_0, Type.Q4_0),
    ),
    "Gemma2": Tiny(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        "gemma2",
        {
            **COMMON,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": True,
        },
        {**_WINDOWED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0},
        adjust=_gemma2_adjust,
    ),
    "Gemma3": Tiny(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        "gemma3",
        {
            **COMMON,
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {**_WINDOWED, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        adjust=_gemma2_adjust,
    ),
    "Phi3": Tiny(
        "Phi3Config",
        "Phi3ForCausalLM",
        "phi3",
        {
            **COMMON,
            # The original context is three tokens, so that all prompts are longer and use the long factors.
            "original_max_position_embeddings": 3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 3,
                "attention_factor": 1.125,
                "short_factor": [1.0 + place / 16 for place in range(16)],
                "long_factor": [1.0 + place / 2 for place in range(16)],
            },
        },
        {
            "rope.dimension_count": 32,
            "rope.scaling.original_context_length": 3,
            "rope.scaling.attn_factor": 1.125,
        },
        types=(Type.Q4_0, Type.Q8_0),
    ),
    "Phi2": PHI2,
    "Phi2, one matrix": replace(PHI2, fused=True),
    "Mixtral": Tiny(
        "MixtralConfig",
        "MixtralForCausalLM",
        "llama",
        {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "Qwen2-MoE": Tiny(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        "qwen2moe",
        {
            **COMMON,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "norm_topk_prob": False,
        },
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "expert_shared_feed_forward_length": 96,
        },
    ),
    # Each token goes to all experts. Otherwise rounding could choose another expert where two have nearly equal
    # probabilities. Tensors that are divided along their inputs give both workers whole blocks of 256 weights.
    "Qwen3-MoE in blocks, two workers": Tiny(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        {
            **COMMON,
            "hidden_size": 256,
            "head_dim": 128,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        {
            "attention.key_length": 128,
            "attention.value_length": 128,
            "expert_count": 4,
            "expert_used_count": 4,
            "expert_feed_forward_length": 512,
        },
        types=(Type.Q8_0, Type.Q4_K, Type.Q6_K),
        workers=2,
    ),
}
"""Models by name. The tests serve all of them."""

MISTRAL = Tiny("MistralConfig", "MistralForCausalLM", "llama", {**COMMON, "sliding_window": None})
"""A model whose file has the architecture "llama"."""

ONE_KV_HEAD = Tiny(
    "LlamaConfig",
    "LlamaForCausalLM",
    "llama",
    {**COMMON, "num_key_value_heads": 1, "tie_word_embeddings": True},
    types=(Type.Q8_0, Type.Q4_1),
    workers=2,
)
"""A model for two workers. Its only KV head is replicated on both."""

EVERY_TYPE = Tiny(
    "LlamaConfig",
    "LlamaForCausalLM",
    "llama",
    WIDE,
    {"attention.key_length": 64, "attention.value_length": 64},
    types=(
        *(Type.Q8_0, Type.Q4_0, Type.Q6_K, Type.Q4_K, Type.Q5_0, Type.Q5_1, Type.Q2_K, Type.Q3_K),
        *(Type.Q5_K, Type.IQ4_NL, Type.F16, Type.Q4_1, Type.BF16, Type.F32),
    ),
)
"""A model with a matrix of every supported type."""
