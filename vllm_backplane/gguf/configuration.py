"""The configuration of a model, in Hugging Face's terms, from the metadata of its GGUF file."""

from __future__ import annotations

import math
import struct
from typing import Any

from gguf import GGMLQuantizationType

from vllm_backplane.errors import CheckpointError, shown
from vllm_backplane.gguf.architectures import Architecture, architecture_of
from vllm_backplane.gguf.consistency import insist_on_layers, insist_on_shapes
from vllm_backplane.gguf.model_files import Gguf, Placed

QUANTIZATION = "gguf"
"""The name of the quantization method and of the load format."""

_REQUIRED = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
_LARGEST = 1 << 24
"""Of any size in a configuration; the longest contexts and the largest vocabularies are below it."""
_POSITIONS = 1 << 28
"""Bytes that the table of positions may take in any case. vLLM makes it for the whole context, in float32 at first:
where it would take more than this and more than the file, the context's length is not the model's."""

_HALVES = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}

_LLAMA3_FACTORS = (8.0, 32.0)
"""Of the models that have been published with Llama 3's scaling of positions; the other parameters are common."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_GEMMA_LARGE = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, which scale queries by the width per head instead of the head's size."""
_GEMMA3_PATTERN = 6


class _Reader:
    def __init__(self, model: Gguf) -> None:
        self._model = model
        self.architecture = str(model.text("general.architecture"))

    def number(self, key: str) -> int | None:
        found = self._model.number(f"{self.architecture}.{key}")
        if found is not None and not 0 <= found < _LARGEST:
            raise self.fault(f"{self.architecture}.{key} is {found}")
        return found

    def real(self, key: str) -> float | None:
        found = self._model.real(f"{self.architecture}.{key}")
        if found is not None and not math.isfinite(found):
            raise self.fault(f"{self.architecture}.{key} is {found}")
        return found

    def base(self, key: str) -> float:
        """Of the frequencies of positions."""
        found = self.real(key) or 10000.0
        if found < 0:
            raise self.fault(f"{self.architecture}.{key} is {found}")
        return found

    def text(self, key: str) -> str | None:
        return self._model.text(f"{self.architecture}.{key}")

    def positive(self, key: str) -> int:
        found = self.number(key)
        if not found:
            raise self.fault(f"it does not say {self.architecture}.{key}")
        return found

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._model.path} cannot be served: {what}; make it anew with a current converter")


def configuration(model: Gguf) -> dict[str, Any]:
    """The content of config.json."""
    architecture, reader = architecture_of(model), _Reader(model)
    made: dict[str, Any] = {name: reader.positive(key) for name, key in _REQUIRED.items()}
    insist_on_layers(model, architecture, made["num_hidden_layers"])
    heads = made["num_attention_heads"]
    table = model.tensors.get("token_embd.weight")
    if table is None or len(table.tensor.shape) != 2 or table.tensor.shape[1] != made["hidden_size"]:
        raise reader.fault(f"it has no embedding (token_embd.weight) of vectors of {made['hidden_size']}")
    head_dim = reader.number("attention.key_length") or _head_dim(model, heads) or made["hidden_size"] // heads
    if not head_dim or head_dim % 2 or heads > made["hidden_size"]:
        raise reader.fault(f"{heads} heads of {head_dim} in a width of {made['hidden_size']} cannot be")
    made |= {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": table.tensor.shape[0],
        "num_key_value_heads": reader.number("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        **_epsilon(reader, mean=architecture.biased),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "hidden_act": "silu",
        **_biases(model, architecture),
        "rope_parameters": _positions(model, reader, head_dim),
        "torch_dtype": _type_of_matrices(model),
        "use_cache": True,
        **architecture.defaults,
    }
    if reader.architecture in ("gemma2", "gemma3"):
        made |= _gemma(reader, made)
    elif reader.architecture == "phi3":
        made |= _phi3(model, reader, made)
    if architecture.experts:
        made |= _experts(reader, made)
    made |= _tokens(model)
    insist_on_shapes(model, architecture, made)
    _insist_on_context(model, reader, made)
    return made


def _type_of_matrices(model: Gguf) -> str:
    """What `--dtype auto` keeps to. vLLM takes float32 for a wish to be downcast to what the platform likes best, so a
    file in half precision says so: its numbers would be rounded otherwise."""
    kinds = {found.tensor.type for found in model.tensors.values() if len(found.tensor.shape) > 1}
    return _HALVES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _head_dim(model: Gguf, heads: int) -> int:
    """From the weights: older files do not say it, and it need not be the width over the heads."""
    queries = model.tensors.get("blk.0.attn_q.weight")
    return queries.tensor.shape[0] // heads if queries is not None else 0


def _biases(model: Gguf, architecture: Architecture) -> dict[str, bool]:
    """By Llama's names; what else has them has those of queries, keys and values alone, and calls them attention's."""
    attention, output, gated = (f"blk.0.{part}.bias" in model.tensors for part in ("attn_q", "attn_output", "ffn_gate"))
    if architecture.model_type != "llama":
        return {"attention_bias": attention}
    return {"attention_bias": output, "qkv_bias": attention, "mlp_bias": gated}


def _epsilon(reader: _Reader, mean: bool) -> dict[str, float]:
    """Of norms, with a `mean` or by squares. The number that was meant, not its float32 neighbour: 1e-05, not
    9.999999747378752e-06."""
    key = f"attention.layer_norm_{'' if mean else 'rms_'}epsilon"
    found = reader.real(key)
    if found is None or not 0 < found < 1:
        raise reader.fault(f"{reader.architecture}.{key} is {found}")
    return {"layer_norm_eps" if mean else "rms_norm_eps": float(f"{found:.6g}")}


def _positions(model: Gguf, reader: _Reader, head_dim: int) -> dict[str, Any]:
    theta = reader.base("rope.freq_base")
    rotated = reader.number("rope.dimension_count") or head_dim
    if rotated > head_dim or rotated % 2:
        raise reader.fault(f"{reader.architecture}.rope.dimension_count is {rotated} in heads of {head_dim}")
    if rotated != head_dim and reader.architecture not in ("phi2", "phi3"):
        raise reader.fault(f"{rotated} features of {head_dim} are rotated, which is not known of {reader.architecture}")
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if reader.architecture == "phi2":
        made["partial_rotary_factor"] = rotated / head_dim
    scaling = reader.text("rope.scaling.type") or "none"
    factor = reader.real("rope.scaling.factor") or 1.0
    if factor < 0:
        raise reader.fault(f"{reader.architecture}.rope.scaling.factor is {factor}")
    factors = model.tensors.get("rope_freqs.weight")
    if factors is not None:
        made |= _llama3(reader, _factors(reader, factors, "rope_freqs", head_dim // 2), theta, head_dim)
    elif scaling == "linear" and factor != 1.0:
        made |= {"rope_type": "linear", "factor": factor}
    elif scaling not in ("none", "linear") and (scaling, reader.architecture) != ("longrope", "phi3"):
        raise reader.fault(f"positions are scaled by {shown(scaling)}, not served (none, linear and Llama 3's are)")
    if reader.architecture != "gemma3":
        return made
    local = {"rope_type": "default", "rope_theta": reader.base("rope.freq_base_swa")}
    return {"full_attention": made, "sliding_attention": local}


def _factors(reader: _Reader, placed: Placed | None, name: str, count: int) -> list[float]:
    """Of positions, which a file has as a tensor."""
    if placed is None or placed.tensor.type != GGMLQuantizationType.F32 or placed.tensor.shape != (count,):
        raise reader.fault(f"its {name}.weight is not {count} factors in F32")
    found = [one for (one,) in struct.iter_unpack("<f", placed.file.bytes_of(placed.tensor))]
    if not all(math.isfinite(one) and one > 0 for one in found):
        raise reader.fault(f"its {name}.weight has factors that are not positive")
    return found


def _llama3(reader: _Reader, found: list[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters whose factors are in the file, which has the factors alone."""
    for factor in _LLAMA3_FACTORS:
        expected = _llama3_factors(factor, theta, head_dim)
        if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(found, expected, strict=True)):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise reader.fault("rope_freqs.weight holds factors that are not those of Llama 3.1 or 3.2")


def _llama3_factors(factor: float, theta: float, head_dim: int) -> list[float]:
    original, low, high = (_LLAMA3[key] for key in ("original_max_position_embeddings", *list(_LLAMA3)[:2]))
    made = []
    for index in range(0, head_dim, 2):
        turns = original / (2 * math.pi * theta ** (index / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        made.append(1 / ((1 - smooth) / factor + smooth))
    return made


def _gemma(reader: _Reader, made: dict[str, Any]) -> dict[str, Any]:
    layers = made["num_hidden_layers"]
    large = layers == _GEMMA_LARGE[reader.architecture]
    pattern = _GEMMA3_PATTERN if reader.architecture == "gemma3" else 2
    more: dict[str, Any] = {
        "query_pre_attn_scalar": made["hidden_size"] // made["num_attention_heads"] if large else made["head_dim"],
        "sliding_window": reader.positive("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)
        ],
        "attn_logit_softcapping": reader.real("attn_logit_softcapping"),
        "final_logit_softcapping": reader.real("final_logit_softcapping"),
    }
    if reader.architecture == "gemma3":
        more["sliding_window_pattern"] = pattern
    return more


def _phi3(model: Gguf, reader: _Reader, made: dict[str, Any]) -> dict[str, Any]:
    rotated = reader.number("rope.dimension_count") or made["head_dim"]
    more = {
        "partial_rotary_factor": rotated / made["head_dim"],
        "sliding_window": reader.number("attention.sliding_window"),
    }
    tables = {kind: model.tensors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long")}
    if not any(tables.values()):
        return more
    original = reader.positive("rope.scaling.original_context_length")
    positions = {**made["rope_parameters"], "rope_type": "longrope", "original_max_position_embeddings": original}
    for kind, placed in tables.items():
        positions[f"{kind}_factor"] = _factors(reader, placed, f"rope_factors_{kind}", rotated // 2)
    if attention := reader.real("rope.scaling.attn_factor"):
        positions |= {"short_mscale": attention, "long_mscale": attention}
    return {**more, "rope_parameters": positions, "original_max_position_embeddings": original}


def _experts(reader: _Reader, made: dict[str, Any]) -> dict[str, Any]:
    """Mixtral calls its experts local, and gives them the whole width."""
    experts, used = reader.positive("expert_count"), reader.positive("expert_used_count")
    if used > experts:
        raise reader.fault(f"{used} experts of {experts} are used")
    width = reader.number("expert_feed_forward_length") or made["intermediate_size"]
    return {
        "num_local_experts": experts,
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": reader.number("expert_shared_feed_forward_length") or 0,
    }


def _insist_on_context(model: Gguf, reader: _Reader, made: dict[str, Any]) -> None:
    positions = made["rope_parameters"]
    context = max(made["max_position_embeddings"], made.get("original_max_position_embeddings", 0))
    factor = positions.get("full_attention", positions).get("factor", 1.0)
    stretched = max(factor, 1.0) if reader.text("rope.scaling.type") == "linear" else 1.0
    if context * stretched * made["head_dim"] * 4 > max(_POSITIONS, model.size):
        raise reader.fault(
            f"{reader.architecture}.context_length is {context}, stretched by {stretched:g}: the table of its "
            "positions would be larger than the model"
        )


def _tokens(model: Gguf) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: model.number(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: number for name, number in found.items() if number is not None}
