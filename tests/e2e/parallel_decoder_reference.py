"""Implements the architecture of examples/parallel_decoder in plain PyTorch, and writes checkpoints of it.

The implementation computes one sequence, without a KV cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from reference import Continuation, continuation
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 512, 128, 192, 3, 4, 2
SIZE = HIDDEN // HEADS
EPSILON, THETA = 1e-5, 10000.0

CONFIG = {
    "model_type": "parallel_decoder",
    "architectures": ["ParallelDecoderForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SHAPES = {
    "q_proj": (HEADS * SIZE, HIDDEN),
    "k_proj": (KV_HEADS * SIZE, HIDDEN),
    "v_proj": (KV_HEADS * SIZE, HIDDEN),
    "o_proj": (HIDDEN, HEADS * SIZE),
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}


def save(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with random weights to `folder`, and returns the weights."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    weights = {"embed_tokens.weight": draw(VOCABULARY, HIDDEN), "norm.weight": 1 + 0.2 * draw(HIDDEN)}
    weights["lm_head.weight"] = draw(VOCABULARY, HIDDEN) / HIDDEN**0.5
    for layer in range(LAYERS):
        weights[f"layers.{layer}.norm.weight"] = 1 + 0.2 * draw(HIDDEN)
        for name, shape in SHAPES.items():
            weights[f"layers.{layer}.{name}.weight"] = draw(*shape) / shape[1] ** 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return weights


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    """Applies rotary position embeddings to [heads, tokens, size]; the halves of a head are paired."""
    half = SIZE // 2
    angles = torch.outer(torch.arange(heads.shape[1]), THETA ** (-torch.arange(half) / half))
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def logits(weights: dict[str, torch.Tensor], ids: Sequence[int], *, in_sequence: bool = False) -> torch.Tensor:
    """Returns the logits of the token after `ids`.

    Attention and MLP have the same input. With `in_sequence`, the MLP instead reads the output of attention, as in most
    models.
    """
    stream = weights["embed_tokens.weight"][torch.tensor(ids)]

    def heads(of: torch.Tensor, count: int) -> torch.Tensor:
        return of.view(len(ids), count, SIZE).transpose(0, 1)

    for layer in range(LAYERS):
        own = {name: weights[f"layers.{layer}.{name}.weight"] for name in (*SHAPES, "norm")}
        normal = rms_norm(stream, (HIDDEN,), own["norm"], EPSILON)
        queries, keys = heads(linear(normal, own["q_proj"]), HEADS), heads(linear(normal, own["k_proj"]), KV_HEADS)
        values = heads(linear(normal, own["v_proj"]), KV_HEADS)
        attended = scaled_dot_product_attention(
            _rotated(queries), _rotated(keys), values, is_causal=True, enable_gqa=True
        )
        attended = linear(attended.transpose(0, 1).flatten(1), own["o_proj"])
        read = rms_norm(stream + attended, (HIDDEN,), own["norm"], EPSILON) if in_sequence else normal
        computed = linear(silu(linear(read, own["gate_proj"])) * linear(read, own["up_proj"]), own["down_proj"])
        stream = stream + attended + computed
    return linear(rms_norm(stream[-1], (HIDDEN,), weights["norm.weight"], EPSILON), weights["lm_head.weight"])


def continue_greedily(
    weights: dict[str, torch.Tensor], prompt: Sequence[int], tokens: int, *, in_sequence: bool = False
) -> Continuation:
    """Continues a prompt by greedy decoding."""
    ids, steps = list(prompt), []
    for _ in range(tokens):
        steps.append(logits(weights, ids, in_sequence=in_sequence))
        ids.append(int(steps[-1].argmax()))
    return continuation(torch.stack(steps))
