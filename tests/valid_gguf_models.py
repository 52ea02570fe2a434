"""Builds valid GGUF models of one layer and four tokens, one per kind of architecture, and mutations of them.

A mutation is encoded in bytes for the fuzzer (`orders`): the first byte selects the model, and each following pair of
bytes selects what is changed and the new value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.gguf_bytes import ARRAY, BOOL, F32_VALUE, STRING, U32, U64, File, array, f32, key, tensor, text, u32, u64

METADATA: dict[str, Any] = {
    "context_length": 16,
    "embedding_length": 32,
    "block_count": 1,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.key_length": 16,
    "rope.dimension_count": 16,
    "rope.freq_base": 1e4,
    "rope.scaling.factor": 1.0,
    "rope.scaling.type": "none",
    "attention.sliding_window": 4,
}
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.add_bos_token": True,
}
TOP: dict[str, list[int]] = {"token_embd.weight": [32, 4], "output_norm.weight": [32], "output.weight": [32, 4]}
ATTENTION: dict[str, list[int]] = {
    "attn_norm.weight": [32],
    "ffn_norm.weight": [32],
    "attn_q.weight": [32, 32],
    "attn_k.weight": [32, 16],
    "attn_v.weight": [32, 16],
    "attn_output.weight": [32, 32],
}
GATED: dict[str, list[int]] = {"ffn_gate.weight": [32, 64], "ffn_up.weight": [32, 64], "ffn_down.weight": [64, 32]}
QKV_BIASES: dict[str, list[int]] = {"attn_q.bias": [32], "attn_k.bias": [16], "attn_v.bias": [16]}
GATED_BIASES: dict[str, list[int]] = {"ffn_gate.bias": [64], "ffn_up.bias": [64], "ffn_down.bias": [32]}
EXPERTS: dict[str, list[int]] = {
    "ffn_gate_inp.weight": [32, 2],
    "ffn_gate_exps.weight": [32, 64, 2],
    "ffn_up_exps.weight": [32, 64, 2],
    "ffn_down_exps.weight": [64, 32, 2],
}
SHARED: dict[str, list[int]] = {
    "ffn_gate_inp_shexp.weight": [32],
    "ffn_gate_shexp.weight": [32, 64],
    "ffn_up_shexp.weight": [32, 64],
    "ffn_down_shexp.weight": [64, 32],
}
FOUR_NORMS: dict[str, list[int]] = {
    **{f"{name}.weight": [32] for name in ("post_attention_norm", "post_ffw_norm")},
    **{f"{name}.weight": [16] for name in ("attn_q_norm", "attn_k_norm")},
}
PHI3: dict[str, list[int]] = {"attn_qkv.weight": [32, 64], "ffn_up.weight": [32, 128], "ffn_down.weight": [64, 32]}
PHI2: dict[str, list[int]] = {
    **{name: shape for name, shape in ATTENTION.items() if name != "ffn_norm.weight"},
    **QKV_BIASES,
    "attn_norm.bias": [32],
    "attn_output.bias": [32],
    "ffn_up.weight": [32, 64],
    "ffn_up.bias": [64],
    "ffn_down.weight": [64, 32],
    "ffn_down.bias": [32],
}


@dataclass(frozen=True)
class Model:
    architecture: str
    layer: dict[str, list[int]]
    """Shapes in the order of the file: the innermost dimension first."""
    top: dict[str, list[int]] = field(default_factory=lambda: TOP)
    more: dict[str, Any] = field(default_factory=dict)
    """Metadata in addition to METADATA and TOKENIZER."""
    parts: int = 1

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {**self.top, **{f"blk.0.{name}": shape for name, shape in self.layer.items()}}

    @property
    def metadata(self) -> dict[str, Any]:
        split = {"split.no": 0, "split.count": self.parts, "split.tensors.count": len(self.shapes)}
        return {**METADATA, **self.more, **TOKENIZER, **(split if self.parts > 1 else {})}


_ROUTED = {"expert_count": 2, "expert_used_count": 1}
MODELS = {
    "llama": Model("llama", {**ATTENTION, **GATED}),
    # With this base all factors of Llama 3.1 are 1, the value of all tensors here.
    "llama, biases, factors": Model(
        "llama",
        {**ATTENTION, **GATED, **QKV_BIASES, **GATED_BIASES, "attn_output.bias": [32]},
        top={**TOP, "rope_freqs.weight": [8]},
        more={"rope.freq_base": 1.0},
    ),
    "llama, experts": Model("llama", {**ATTENTION, **EXPERTS}, more=_ROUTED),
    "qwen2moe": Model(
        "qwen2moe",
        {**ATTENTION, **QKV_BIASES, **EXPERTS, **SHARED},
        more={**_ROUTED, "expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 64},
    ),
    "gemma3": Model("gemma3", {**ATTENTION, **GATED, **FOUR_NORMS}, more={"rope.freq_base_swa": 1e4}),
    "phi3": Model(
        "phi3",
        {**{name: ATTENTION[name] for name in ("attn_norm.weight", "ffn_norm.weight", "attn_output.weight")}, **PHI3},
        top={**TOP, "rope_factors_long.weight": [8], "rope_factors_short.weight": [8]},
        more={"rope.scaling.original_context_length": 8, "rope.scaling.attn_factor": 1.5},
    ),
    "phi2": Model(
        "phi2",
        PHI2,
        top={**TOP, "output_norm.bias": [32], "output.bias": [4]},
        more={"attention.layer_norm_epsilon": 1e-5},
    ),
    "in two parts": Model("llama", {**ATTENTION, **GATED}, parts=2),
}
VALUES: list[Any] = [
    *(0, 1, 3, 5, 1 << 23, (1 << 31) - 1, 1 << 63),
    *(-1.0, 0.5, 1e30, float("nan"), True),
    *("", "linear", "yarn", "llama", "no_vocab", "qwen2", "smollm"),
    *(["a", "a", "ab", "<s>"], ["b a"], ["a"] * 9, [1, 2], [1.0, 2.0, 3.0, 4.0], ["x" * 600]),
]
"""New values of metadata."""
TYPES = [getattr(GGMLQuantizationType, name) for name in ("F16", "BF16", "Q8_0", "Q4_0", "IQ4_XS", "TQ1_0")]
FATES = 4 + len(TYPES)
"""Number of changes to a tensor: it is removed, has one column, has a column more, the same in F16, or another type."""
OTHERS = ("general.architecture", "another layer")


def places(model: Model) -> list[str]:
    return [*model.metadata, *model.shapes, *OTHERS]


def single_changes() -> list[bytes]:
    """Returns orders with one change each, because a check is reached only if all checks before it pass.

    Parts that several models share are changed only in the first. Values other than strings get every third new value,
    because many of those test the same check of a number.
    """
    orders, seen = [], set()
    for number, model in enumerate(MODELS.values()):
        for what, place in enumerate(places(model)):
            if place not in seen:
                is_text = isinstance(model.metadata.get(place), str) or place in OTHERS
                into = (
                    range(FATES)
                    if place in model.shapes
                    else range(0 if is_text else what % 3, len(VALUES), 1 if is_text else 3)
                )
                orders += [bytes((number, what, one)) for one in into]
            seen.add(place)
    return orders


def mutated_model(orders: bytes) -> list[bytes]:
    """Returns the file, or the parts, of a valid model with the changes of `orders`."""
    model = list(MODELS.values())[orders[0] % len(MODELS) if orders else 0]
    metadata, shapes, types = model.metadata, model.shapes, dict.fromkeys(model.shapes, GGMLQuantizationType.F32)
    architecture: Any = model.architecture
    known = places(model)
    for what, into in zip(orders[1::2], orders[2::2], strict=False):
        place = known[what % len(known)]
        if place in metadata:
            metadata[place] = VALUES[into % len(VALUES)]
        elif place == "general.architecture":
            architecture = VALUES[into % len(VALUES)]
        elif place == "another layer":
            shapes[f"blk.{into}.attn_norm.weight"] = [32]
        else:
            _change_tensor(place, into % FATES, shapes, types)
    keys = [key("general.architecture", *value(architecture))]
    for name, one in metadata.items():
        full = name if name.startswith(("tokenizer.", "split.")) else f"{architecture}.{name}"
        keys.append(key(full, *value(one)))
    if model.parts == 1:
        return [_file(keys, shapes, types)]
    names = list(shapes)
    first, second = ({name: shapes[name] for name in half} for half in (names[::2], names[1::2]))
    later = [key("split.no", *value(1)), key("split.count", *value(2))]
    return [_file(keys, first, types), _file(later, second, types)]


def built(model: Model, metadata: dict[str, Any], more: Sequence[bytes] = ()) -> bytes:
    """Returns the file of a model in one part, with other metadata, and `more` keys. A value may be encoded already, as
    by `value`."""
    keys = [key("general.architecture", *value(model.architecture))]
    for name, one in {**model.metadata, **metadata}.items():
        if one is not None:  # None removes a key
            full = name if name.startswith("tokenizer.") else f"{model.architecture}.{name}"
            keys.append(key(full, *(one if isinstance(one, tuple) else value(one))))
    return _file([*keys, *more], model.shapes, {})


def _change_tensor(place: str, fate: int, shapes: dict[str, list[int]], types: dict[str, Any]) -> None:
    if place not in shapes:
        return  # an earlier change has removed it
    if fate == 0:
        del shapes[place]
    elif fate <= 3:
        columns, *rows = shapes[place]
        shapes[place] = [1 if fate == 1 else columns + 1, *rows]
        types[place] = types[place] if fate < 3 else GGMLQuantizationType.F16
    else:
        types[place] = TYPES[fate - 4]


def _file(keys: list[bytes], shapes: dict[str, list[int]], types: dict[str, Any]) -> bytes:
    tensors, data = [], b""
    for name, shape in shapes.items():
        kind = types.get(name, GGMLQuantizationType.F32)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        tensors.append(tensor(name, shape, int(kind), len(data)))
        size = -(-prod(shape) // per_block) * block_bytes
        data += f32(1.0) * (-(-size // 32) * 8)
    return File(keys=keys, tensors=tensors, data=data).build()


def value(given: Any) -> tuple[int, bytes]:
    """Returns the type number and the bytes of a metadata value."""
    match given:
        case bool():
            return BOOL, bytes([given])
        case int():
            return (U32, u32(given)) if given < 1 << 32 else (U64, u64(given))
        case float():
            return F32_VALUE, f32(given)
        case str():
            return STRING, text(given)
    kinds = {value(one)[0] for one in given}
    return ARRAY, array(min(kinds, default=U32), len(given), b"".join(value(one)[1] for one in given))
