"""Makes a Hugging Face configuration (config.json) from the metadata of a GGUF file."""

from __future__ import annotations

import math
import struct
from typing import Any

from vllm_backplane.errors import CheckpointError, short_repr
from vllm_backplane.gguf.architectures import Architecture, architecture_of
from vllm_backplane.gguf.consistency import require_layers, require_shapes
from vllm_backplane.gguf.model_files import GgufModel, TensorLocation
from vllm_backplane.gguf.tensor_types import GGMLQuantizationType

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
"""Upper bound of every size in a configuration; the longest contexts and the largest vocabularies are below it."""
_RANGES = {
    "attention.layer_norm_epsilon": (1e-13, 1e-2),
    "attention.layer_norm_rms_epsilon": (1e-13, 1e-2),
    "rope.freq_base": (1.0, 1e12),
    "rope.freq_base_swa": (1.0, 1e12),
    "rope.scaling.factor": (1e-2, 1e5),
    "rope.scaling.attn_factor": (1e-2, 1e2),
    "attn_logit_softcapping": (1e-2, 1e5),
    "final_logit_softcapping": (1e-2, 1e5),
}
"""Ranges of the numbers of a file by key, far beyond those of published models. A number outside of its range cannot be
meant: most of them would make every output NaN."""
_ROTARY_TABLE_BYTES = 1 << 28
"""Size up to which the rotary embedding table is always accepted. vLLM allocates the table for the whole context, in
float32 at first. A table larger than this and larger than the file means that the file's context length is wrong."""

_HALVES = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}

_LLAMA3_FACTORS = (8.0, 32.0)
"""RoPE scaling factors of the published models with Llama 3's scaling; they share the other parameters."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_GEMMA_LARGE = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, which scale queries by hidden_size / heads instead of by head_dim."""
_GEMMA3_PATTERN = 6


class _Reader:
    """Reads metadata keys below the name of the architecture, and checks their range."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self.architecture = str(model.text("general.architecture"))

    def number(self, key: str) -> int | None:
        found = self._model.number(f"{self.architecture}.{key}")
        if found is not None and not 0 <= found < _LARGEST:
            raise self.fault(f"{self.architecture}.{key} is {found}")
        return found

    def real(self, key: str) -> float | None:
        """Returns a number within its range in `_RANGES`, or None if the file has none or 0."""
        found = self._model.real(f"{self.architecture}.{key}")
        low, high = _RANGES[key]
        if found and not low <= found <= high:  # NaN is outside of every range
            raise self.fault(f"{self.architecture}.{key} is {found:g}, not from {low:g} to {high:g}")
        return found or None

    def rope_theta(self, key: str) -> float:
        """Returns the base of the rotary frequencies, 10000 where the file has none."""
        return self.real(key) or 10000.0

    def text(self, key: str) -> str | None:
        return self._model.text(f"{self.architecture}.{key}")

    def positive(self, key: str) -> int:
        found = self.number(key)
        if not found:
            raise self.fault(f"{self.architecture}.{key} is missing or 0")
        return found

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._model.path} cannot be served: {what}; convert the model again with a current converter"
        )


def configuration(model: GgufModel) -> dict[str, Any]:
    """Returns the content of config.json."""
    architecture, reader = architecture_of(model), _Reader(model)
    config: dict[str, Any] = {name: reader.positive(key) for name, key in _REQUIRED.items()}
    require_layers(model, architecture, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    table = model.tensors.get("token_embd.weight")
    if table is None or len(table.tensor.shape) != 2 or table.tensor.shape[1] != config["hidden_size"]:
        raise reader.fault(f"it has no embedding (token_embd.weight) with vectors of {config['hidden_size']} values")
    head_dim = reader.number("attention.key_length") or _head_dim(model, heads) or config["hidden_size"] // heads
    if not head_dim or head_dim % 2 or heads > config["hidden_size"]:
        raise reader.fault(f"{heads} heads of size {head_dim} do not fit a hidden size of {config['hidden_size']}")
    config |= {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": table.tensor.shape[0],
        "num_key_value_heads": reader.number("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        **_epsilon(reader, layer_norm=architecture.biased),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "hidden_act": "silu",
        **_biases(model, architecture),
        "rope_parameters": _rope_parameters(model, reader, head_dim),
        "torch_dtype": _matrix_dtype(model),
        "use_cache": True,
        **architecture.defaults,
    }
    if reader.architecture in ("gemma2", "gemma3"):
        config |= _gemma(reader, config)
    elif reader.architecture == "phi3":
        config |= _phi3(model, reader, config)
    if architecture.experts:
        config |= _experts(reader, config)
    config |= _token_ids(model)
    require_shapes(model, architecture, config)
    _require_plausible_context(model, reader, config)
    return config


def _matrix_dtype(model: GgufModel) -> str:
    """Returns the dtype that `--dtype auto` resolves to: that of the matrices where all are in one half precision.

    With float32 vLLM downcasts to the dtype that the platform prefers, which would round the values of such a file.
    """
    kinds = {found.tensor.type for found in model.tensors.values() if len(found.tensor.shape) > 1}
    return _HALVES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _head_dim(model: GgufModel, heads: int) -> int:
    """Returns the head size from the shape of Q, or 0 where there is no Q.

    Older files have no key for the head size, and it need not be hidden_size / heads.
    """
    queries = model.tensors.get("blk.0.attn_q.weight")
    return queries.tensor.shape[0] // heads if queries is not None else 0


def _biases(model: GgufModel, architecture: Architecture) -> dict[str, bool]:
    """Returns the configuration's bias flags.

    Llama has one flag each for QKV, the output projection and the MLP. Other architectures have biases only in QKV and
    call their flag `attention_bias`.
    """
    qkv, output, gated = (f"blk.0.{part}.bias" in model.tensors for part in ("attn_q", "attn_output", "ffn_gate"))
    if architecture.model_type != "llama":
        return {"attention_bias": qkv}
    return {"attention_bias": output, "qkv_bias": qkv, "mlp_bias": gated}


def _epsilon(reader: _Reader, layer_norm: bool) -> dict[str, float]:
    """Returns the epsilon of LayerNorm or RMSNorm, rounded to the decimal number it was made from: 1e-05 instead of
    its float32 neighbour 9.999999747378752e-06."""
    key = f"attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon"
    found = reader.real(key)
    if found is None:
        raise reader.fault(f"{reader.architecture}.{key} is missing or 0")
    return {"layer_norm_eps" if layer_norm else "rms_norm_eps": float(f"{found:.6g}")}


def _rope_parameters(model: GgufModel, reader: _Reader, head_dim: int) -> dict[str, Any]:
    theta = reader.rope_theta("rope.freq_base")
    rotated = reader.number("rope.dimension_count") or head_dim
    if rotated > head_dim or rotated % 2:
        raise reader.fault(f"{reader.architecture}.rope.dimension_count is {rotated} in heads of {head_dim}")
    if rotated != head_dim and reader.architecture not in ("phi2", "phi3"):
        raise reader.fault(
            f"{rotated} of {head_dim} features are rotated, which is not supported for {reader.architecture}"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if reader.architecture == "phi2":
        rope["partial_rotary_factor"] = rotated / head_dim
    scaling = reader.text("rope.scaling.type") or "none"
    factor = reader.real("rope.scaling.factor") or 1.0
    factors = model.tensors.get("rope_freqs.weight")
    if factors is not None:
        rope |= _llama3(reader, _factors(reader, factors, "rope_freqs", head_dim // 2), theta, head_dim)
    elif scaling == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif scaling not in ("none", "linear") and (scaling, reader.architecture) != ("longrope", "phi3"):
        raise reader.fault(
            f"its RoPE scaling {short_repr(scaling)} is not served (none, linear and that of Llama 3 are served)"
        )
    if reader.architecture != "gemma3":
        return rope
    local = {"rope_type": "default", "rope_theta": reader.rope_theta("rope.freq_base_swa")}
    return {"full_attention": rope, "sliding_attention": local}


def _factors(reader: _Reader, location: TensorLocation | None, name: str, count: int) -> list[float]:
    """Returns the RoPE scaling factors that a file stores as a tensor, each of which is in the range of a file's only
    factor."""
    if location is None or location.tensor.type != GGMLQuantizationType.F32 or location.tensor.shape != (count,):
        raise reader.fault(f"its {name}.weight is not {count} factors in F32")
    found = [one for (one,) in struct.iter_unpack("<f", location.file.bytes_of(location.tensor))]
    low, high = _RANGES["rope.scaling.factor"]
    for one in found:
        if not low <= one <= high:  # NaN is outside of every range
            raise reader.fault(f"its {name}.weight has the factor {one:g}, not from {low:g} to {high:g}")
    return found


def _llama3(reader: _Reader, found: list[float], theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the Llama 3 scaling parameters that give the factors `found`; a file has only the factors."""
    for factor in _LLAMA3_FACTORS:
        expected = _llama3_factors(factor, theta, head_dim)
        if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(found, expected, strict=True)):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise reader.fault("rope_freqs.weight holds factors that are not those of Llama 3.1 or 3.2")


def _llama3_factors(factor: float, theta: float, head_dim: int) -> list[float]:
    original, low, high = (_LLAMA3[key] for key in ("original_max_position_embeddings", *list(_LLAMA3)[:2]))
    factors = []
    for index in range(0, head_dim, 2):
        turns = original / (2 * math.pi * theta ** (index / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _gemma(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    large = layers == _GEMMA_LARGE[reader.architecture]
    pattern = _GEMMA3_PATTERN if reader.architecture == "gemma3" else 2
    more: dict[str, Any] = {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if large
        else config["head_dim"],
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


def _phi3(model: GgufModel, reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    rotated = reader.number("rope.dimension_count") or config["head_dim"]
    more = {
        "partial_rotary_factor": rotated / config["head_dim"],
        "sliding_window": reader.number("attention.sliding_window"),
    }
    tables = {kind: model.tensors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long")}
    if not any(tables.values()):
        return more
    original = reader.positive("rope.scaling.original_context_length")
    rope = {**config["rope_parameters"], "rope_type": "longrope", "original_max_position_embeddings": original}
    for kind, location in tables.items():
        rope[f"{kind}_factor"] = _factors(reader, location, f"rope_factors_{kind}", rotated // 2)
    if attention := reader.real("rope.scaling.attn_factor"):
        rope |= {"short_mscale": attention, "long_mscale": attention}
    return {**more, "rope_parameters": rope, "original_max_position_embeddings": original}


def _experts(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a mixture of experts under all names in use: Mixtral calls its experts local, and their
    width is `intermediate_size`."""
    experts, used = reader.positive("expert_count"), reader.positive("expert_used_count")
    if used > experts:
        raise reader.fault(f"it routes each token to {used} experts and has {experts}")
    width = reader.number("expert_feed_forward_length") or config["intermediate_size"]
    return {
        "num_local_experts": experts,
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": reader.number("expert_shared_feed_forward_length") or 0,
    }


def _require_plausible_context(model: GgufModel, reader: _Reader, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    context = max(config["max_position_embeddings"], config.get("original_max_position_embeddings", 0))
    factor = rope.get("full_attention", rope).get("factor", 1.0)
    scaling = max(factor, 1.0) if reader.text("rope.scaling.type") == "linear" else 1.0
    if context * scaling * config["head_dim"] * 4 > max(_ROTARY_TABLE_BYTES, model.size):
        raise reader.fault(
            f"{reader.architecture}.context_length is {context}, scaled by {scaling:g}: its rotary embedding table "
            "would be larger than the model"
        )


def _token_ids(model: GgufModel) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: model.number(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: number for name, number in found.items() if number is not None}
