"""While a GGUF file is loaded, memory stays near what its weights take in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

pytestmark = [pytest.mark.server]

LIMIT = 1.2
HIDDEN, WIDTH, HEADS, KV_HEADS, LAYERS, VOCABULARY = 896, 4864, 14, 2, 4, 64000


def write(path: Path, kind: gguf.GGMLQuantizationType, tied: bool) -> int:
    """Qwen2.5-0.5B's widths, in blocks of any content. The number of weights that are multiplied."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("none")
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    multiplied = 0

    def add(name: str, rows: int, columns: int) -> None:
        nonlocal multiplied
        multiplied += rows * columns if tied or name != "token_embd" else 0
        blocks = random.integers(0, 128, (rows, columns // per_block * block_bytes), dtype=np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)

    add("token_embd", VOCABULARY, HIDDEN)
    if not tied:
        add("output", VOCABULARY, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    keys = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32))
        for name, rows, columns in (
            *(("attn_q", HIDDEN, HIDDEN), ("attn_k", keys, HIDDEN), ("attn_v", keys, HIDDEN)),
            *(("attn_output", HIDDEN, HIDDEN), ("ffn_gate", WIDTH, HIDDEN), ("ffn_up", WIDTH, HIDDEN)),
            ("ffn_down", HIDDEN, WIDTH),
        ):
            add(f"blk.{layer}.{name}", rows, columns)
            if name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.{layer}.{name}.bias", np.zeros(rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return multiplied


@pytest.mark.parametrize(("kind", "tied", "bits"), [("Q4_0", True, 4.5), ("Q8_0", False, 8.5)])
def test_the_peak_is_near_the_end(tmp_path: Path, kind: str, tied: bool, bits: float) -> None:
    path = tmp_path / "model.gguf"
    multiplied = write(path, gguf.GGMLQuantizationType[kind], tied)
    script = Path(__file__).with_name("loading_memory.py")
    run = subprocess.run(
        [sys.executable, str(script), str(path), "none", "bfloat16"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Loading model.gguf: 100%" in run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    print(f"{kind}: file {path.stat().st_size}, {found}")
    assert found["weights"] == pytest.approx(multiplied * bits / 8, rel=0.02), "something was expanded"
    assert found["after"] > 0.95 * found["weights"], "the weights are elsewhere, and the peak says nothing"
    assert found["peak"] < LIMIT * found["weights"], found
