"""Checks that the metadata of a GGUF file matches its tensors.

vLLM allocates the layers that a configuration describes before it loads any weight. A file whose metadata does not
match its tensors is therefore refused before vLLM sees the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.architectures import GATED, IN_LAYER, QKV, SINGLE_ROW, Architecture
from vllm_backplane.gguf.model_files import GgufModel

_MAX_LAYERS = 1024
_LAYER = re.compile(r"blk\.(\d+)\.")


def require_layers(model: GgufModel, architecture: Architecture, count: int) -> None:
    """Raises `CheckpointError` unless the file has exactly `count` layers with all their tensors."""
    numbers = {match[1] for name in model.tensors if (match := _LAYER.match(name))}
    if count > _MAX_LAYERS:
        raise _fault(model, f"its metadata has {count} layers (block_count), more than the limit of {_MAX_LAYERS}")
    if numbers != {str(number) for number in range(count)}:
        raise _fault(
            model,
            f"its metadata has {count} layers (block_count), which does not match its tensors of {len(numbers)} layers",
        )
    parts = {f"{part}.weight" for part in (*architecture.layer, *architecture.experts)}
    # vLLM has one flag for the biases of all layers, and one for QKV or the gated MLP: if one has a bias, all must.
    biased = {match[2] for name in model.tensors if (match := IN_LAYER.fullmatch(name)) and match[3] == "bias"}
    for together in (QKV, GATED):
        if not biased.isdisjoint(together):
            biased |= together
    parts |= {f"{part}.bias" for part in (architecture.layer if architecture.biased else biased)}
    top = ("output_norm.bias", "output.weight", "output.bias") if architecture.biased else ()
    layers = (f"blk.{number}.{part}" for number in range(count) for part in sorted(parts))
    for name in ("output_norm.weight", *top, *layers):
        if name not in model.tensors:
            raise _fault(model, f"it has no {name}")


def require_shapes(model: GgufModel, architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` unless every tensor has the shape that follows from `config`."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise _fault(model, f"its {heads} attention heads are not a multiple of its {kv_heads} KV heads")
    expected = _shapes(architecture, config)
    for name, location in model.tensors.items():
        match = IN_LAYER.fullmatch(name)
        part, kind = (match[2], match[3]) if match else tuple(name.rpartition(".")[::2])
        whole = expected.get(part)
        if whole is None:
            continue  # `checkpoint_tensors` raises for names that the architecture does not have
        shape = whole if kind == "weight" else whole[:1]
        found = location.tensor.shape
        if found != shape and not (part == SINGLE_ROW and found == shape[1:]):
            raise _fault(model, f"{name} has the shape {found}, and the file's metadata requires {shape}")
    tokens = model.strings("tokenizer.ggml.tokens") or ()
    if len(tokens) > config["vocab_size"]:
        raise _fault(model, f"its vocabulary has {len(tokens)} tokens, and its embedding {config['vocab_size']} rows")


def _shapes(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the expected shapes of weights, by their GGUF names within a layer or outside of layers."""
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    norms = (one for one in (*architecture.top, *architecture.layer) if one.endswith("norm"))
    fused = architecture.layer.get("ffn_up") == "mlp.gate_up_proj"
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(norms, (width,)),
        "attn_q_norm": (config["head_dim"],),
        "attn_k_norm": (config["head_dim"],),
        "token_embd": (vocabulary, width),
        "output": (vocabulary, width),
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_qkv": (queries + 2 * keys, width),
        "attn_output": (width, queries),
        "ffn_gate": (inner, width),
        "ffn_up": (2 * inner if fused else inner, width),
        "ffn_down": (width, inner),
    }
    if architecture.experts:
        experts, shared = config["num_experts"], config["shared_expert_intermediate_size"]
        one = config["moe_intermediate_size"] if architecture.model_type != "mixtral" else inner
        shapes |= {
            "ffn_gate_inp": (experts, width),
            "ffn_gate_exps": (experts, one, width),
            "ffn_up_exps": (experts, one, width),
            "ffn_down_exps": (experts, width, one),
            SINGLE_ROW: (1, width),
            "ffn_gate_shexp": (shared, width),
            "ffn_up_shexp": (shared, width),
            "ffn_down_shexp": (width, shared),
        }
    return shapes


def _fault(model: GgufModel, what: str) -> CheckpointError:
    return CheckpointError(f"{model.path} cannot be served: {what}; convert the model again with a current converter")
