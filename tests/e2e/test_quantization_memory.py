"""While weights are quantized at loading, memory stays near what they take in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.server]

LIMIT = 1.2
"""Most memory while loading, over the size of the weights in the end."""


def save(folder: Path, tied: bool) -> Path:
    """A quarter of Qwen2.5-0.5B's layers: its widths, and a vocabulary that outweighs a layer many times."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=6,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=64000,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.05, 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("tied", "quantization"), [(True, "int8"), (False, "int4")])
def test_the_peak_is_near_the_end(tmp_path: Path, tied: bool, quantization: str) -> None:
    checkpoint = save(tmp_path, tied)
    script = Path(__file__).with_name("loading_memory.py")
    command = [sys.executable, str(script), str(checkpoint), quantization, "bfloat16"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    full = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    print(f"{quantization}: checkpoint {full}, {found}")
    assert found["weights"] < full, "nothing was quantized"
    assert found["after"] > 0.95 * found["weights"], "the weights are elsewhere, and the peak says nothing"
    assert found["peak"] < LIMIT * found["weights"], found
