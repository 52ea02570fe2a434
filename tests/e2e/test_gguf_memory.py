"""Tests that loading a GGUF file needs little more memory than the loaded weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

pytestmark = [pytest.mark.server]

LIMIT = 1.2
"""Largest allowed memory peak while loading, as a multiple of the size of the loaded weights."""
WIDTH, KV_HEADS, HEAD, LAYERS, VOCABULARY = 4864, 2, 64, 3, 40000
EXPERTS, EXPERT_WIDTH = 24, 512


class Case(NamedTuple):
    """Describes a GGUF file to load."""

    architecture: str
    kind: gguf.GGMLQuantizationType
    hidden: int
    tied: bool
    bits: float
    """Bits of a loaded weight in memory."""
    vocabulary: int = VOCABULARY


CASES = {
    "Q4_0, tied": Case("qwen2", gguf.GGMLQuantizationType.Q4_0, 896, True, 4.5),
    "Q8_0": Case("qwen2", gguf.GGMLQuantizationType.Q8_0, 896, False, 8.5),
    # The rows of Q and K have another order in a llama file, so they are copied.
    "llama, Q4_K": Case("llama", gguf.GGMLQuantizationType.Q4_K, 1024, False, 6.0),
    "Q6_K": Case("qwen2", gguf.GGMLQuantizationType.Q6_K, 1024, True, 10.0),
    "Q4_0, experts": Case("qwen3moe", gguf.GGMLQuantizationType.Q4_0, 896, False, 4.5),
    # These are loaded as bfloat16, in the layout of the device.
    "F16": Case("qwen2", gguf.GGMLQuantizationType.F16, 896, False, 16.0, 16384),
    "BF16": Case("qwen2", gguf.GGMLQuantizationType.BF16, 896, False, 16.0, 16384),
}
ALWAYS = {"llama, Q4_K", "Q4_0, experts", "BF16"}
"""The cases of `make test`. `make test-all` loads the others too."""
COPIED = ("F16",)
"""Cases whose embedding is copied instead of being looked up in the file, because its type is not that of the model."""


def write(path: Path, case: Case, width: int = WIDTH, layers: int = LAYERS, vocabulary: int = 0) -> int:
    """Writes a file with random blocks and about the widths of Qwen2.5-0.5B.

    Returns the number of weights that take part in matrix products.
    """
    hidden, kind, tied, vocabulary = case.hidden, case.kind, case.tied, vocabulary or case.vocabulary
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(hidden // HEAD)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("none")
    if case.architecture == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_WIDTH)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    multiplied = 0

    def add(name: str, rows: int, columns: int, *experts: int) -> None:
        nonlocal multiplied
        multiplied += math.prod((*experts, rows, columns)) if tied or name != "token_embd" else 0
        # A float16 whose bytes are below 0x7C is finite.
        blocks = random.integers(0, 0x7C, (*experts, rows, columns // per_block * block_bytes), dtype=np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)

    add("token_embd", vocabulary, hidden)
    if not tied:
        add("output", vocabulary, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    keys = HEAD * KV_HEADS
    for layer in range(layers):
        floats: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        several: tuple[int, ...] = ()
        inner, suffix = width, ""
        if case.architecture == "qwen3moe":
            floats |= {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,), "ffn_gate_inp": (EXPERTS, hidden)}
            inner, suffix, several = EXPERT_WIDTH, "_exps", (EXPERTS,)
        for name, shape in floats.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(shape, np.float32))
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            add(f"blk.{layer}.ffn_{name}{suffix}", rows, columns, *several)
        for name, rows, columns in (
            *(("attn_q", hidden, hidden), ("attn_k", keys, hidden), ("attn_v", keys, hidden)),
            ("attn_output", hidden, hidden),
        ):
            add(f"blk.{layer}.{name}", rows, columns)
            if case.architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.{layer}.{name}.bias", np.zeros(rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return multiplied


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, dict[str, Any]]]:
    """Returns the number of weights in matrix products and the measured memory, by case.

    One process loads all models of the tests that were selected.
    """
    folder = tmp_path_factory.mktemp("files")
    selected = {item.name for item in request.session.items if item.path == request.path}
    cases = {name: case for name, case in CASES.items() if any(f"[{name}]" in one for one in selected)}
    multiplied = [write(folder / f"{number}.gguf", case) for number, case in enumerate(cases.values())]
    given = []
    for number, case in enumerate(cases.values()):
        small = folder / f"small-{number}.gguf"
        write(small, case, width=256, layers=1, vocabulary=512)
        given += [str(small), str(folder / f"{number}.gguf"), "none"]
    shared = folder / "shared.gguf"
    multiplied.append(write(shared, CASES["Q8_0"], width=1024, layers=2, vocabulary=8192))
    given += [str(shared), str(shared), "shared"]
    script = Path(__file__).with_name("loading_memory.py")
    variables = {**os.environ, "BACKPLANE_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    run = subprocess.run(
        [sys.executable, str(script), *given], capture_output=True, text=True, timeout=600, env=variables
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Loading shared.gguf: 100%" in run.stderr
    measured = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"model"')]
    for file in folder.glob("*.gguf"):
        file.unlink()
    return dict(zip((*cases, "shared"), zip(multiplied, measured, strict=True), strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.exhaustive) for name in CASES]
)
def test_the_peak_is_near_the_end(found: dict[str, tuple[int, dict[str, Any]]], name: str) -> None:
    multiplied, memory = found[name]
    print(f"{name}: {memory}, {memory['peak'] / memory['weights']:.3f}")
    case = CASES[name]
    multiplied += case.vocabulary * case.hidden if name in COPIED else 0
    assert memory["weights"] == pytest.approx(multiplied * case.bits / 8, rel=0.02), "weights must stay quantized"
    assert memory["after"] > 0.95 * memory["weights"], "the weights must be in the memory that is measured"
    assert memory["peak"] < LIMIT * memory["weights"], memory


def test_a_second_model_shares_the_weights_of_a_file(found: dict[str, tuple[int, dict[str, Any]]]) -> None:
    """Tests `--load-format backplane_shared`: a second model of the same file needs almost no memory of its own."""
    multiplied, memory = found["shared"]
    print(memory)
    assert memory["weights"] == pytest.approx(multiplied * CASES["Q8_0"].bits / 8, rel=0.02)
    assert memory["after"] < 0.25 * memory["weights"] < memory["peak"], memory
