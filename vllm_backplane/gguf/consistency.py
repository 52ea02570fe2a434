"""What a GGUF file says of itself, against the tensors that it has.

vLLM builds as many layers, of such a size, as a configuration says, and only then asks for weights. So a file whose
numbers are not those of its tensors is refused before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.architectures import ALONE, GATED, IN_LAYER, QKV, Architecture
from vllm_backplane.gguf.model_files import Gguf

_MOST_LAYERS = 1024
_LAYER = re.compile(r"blk\.(\d+)\.")


def insist_on_layers(model: Gguf, architecture: Architecture, count: int) -> None:
    """Exactly `count`, each of them whole."""
    numbers = {match[1] for name in model.tensors if (match := _LAYER.match(name))}
    if count > _MOST_LAYERS:
        raise _fault(model, f"it announces {count} layers (block_count), and {_MOST_LAYERS} are possible")
    if numbers != {str(number) for number in range(count)}:
        raise _fault(
            model, f"it announces {count} layers (block_count), and has tensors of {len(numbers)}, not the same"
        )
    parts = {f"{part}.weight" for part in (*architecture.layer, *architecture.experts)}
    # What one layer, or one product of those that vLLM has one word for, adds to its result, all do.
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


def insist_on_shapes(model: Gguf, architecture: Architecture, made: Mapping[str, Any]) -> None:
    """Every tensor has the shape that the configuration `made` gives it."""
    heads, kv_heads = made["num_attention_heads"], made["num_key_value_heads"]
    if heads % kv_heads:
        raise _fault(model, f"{heads} heads cannot share {kv_heads} heads of keys and values")
    expected = _shapes(architecture, made)
    for name, placed in model.tensors.items():
        match = IN_LAYER.fullmatch(name)
        part, kind = (match[2], match[3]) if match else tuple(name.rpartition(".")[::2])
        whole = expected.get(part)
        if whole is None:
            continue  # refused by name where names are translated
        shape = whole if kind == "weight" else whole[:1]
        found = placed.tensor.shape
        if found != shape and not (part == ALONE and found == shape[1:]):
            raise _fault(model, f"{name} has the shape {found}, and by the file's metadata it would be {shape}")
    tokens = model.words("tokenizer.ggml.tokens") or ()
    if len(tokens) > made["vocab_size"]:
        raise _fault(model, f"it has {len(tokens)} tokens, and {made['vocab_size']} rows in its embedding")


def _shapes(architecture: Architecture, made: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of weights, by name within a layer or at the top."""
    width, inner, vocabulary = made["hidden_size"], made["intermediate_size"], made["vocab_size"]
    queries, keys = (made[name] * made["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    norms = (one for one in (*architecture.top, *architecture.layer) if one.endswith("norm"))
    fused = architecture.layer.get("ffn_up") == "mlp.gate_up_proj"
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(norms, (width,)),
        "attn_q_norm": (made["head_dim"],),
        "attn_k_norm": (made["head_dim"],),
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
        experts, shared = made["num_experts"], made["shared_expert_intermediate_size"]
        one = made["moe_intermediate_size"] if architecture.model_type != "mixtral" else inner
        shapes |= {
            "ffn_gate_inp": (experts, width),
            "ffn_gate_exps": (experts, one, width),
            "ffn_up_exps": (experts, one, width),
            "ffn_down_exps": (experts, width, one),
            ALONE: (1, width),
            "ffn_gate_shexp": (shared, width),
            "ffn_up_shexp": (shared, width),
            "ffn_down_shexp": (width, shared),
        }
    return shapes


def _fault(model: Gguf, what: str) -> CheckpointError:
    return CheckpointError(f"{model.path} cannot be served: {what}; make it anew with a current converter")
