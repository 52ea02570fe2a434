"""Makes models that compute in milliseconds: architectures of transformers with seeded random weights.

The weights are larger than those for training. A freshly initialized model gives almost the same output for every
prompt. Here the next token must depend on the attention of every layer, far more than on rounding.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch


def randomize(model: Any, *, seed: int = 0, scale: float = 1.0) -> None:
    """Draws the parameters of a model.

    Matrices preserve the magnitude of their inputs, times `scale`. Noise is added to vectors.
    """
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * scale / parameter.shape[-1] ** 0.5)


def save_llama(folder: Path, *, tokenizer_of: Path, seed: int = 0) -> Path:
    """Saves a tiny Llama with the tokenizer of another model, and returns the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    randomize(model, seed=seed)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_of / name, folder)
    return folder
