"""Checks the memory that a model's weights take, as computed from the headers of its checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllm_backplane.errors import BackplaneError
from vllm_backplane.gguf.model_files import open_model
from vllm_backplane.weights.checkpoint_size import weight_bytes


def computed(folder: Path, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None) -> int | None:
    model: Any = SimpleNamespace(model=str(folder), revision=None, dtype=dtype, quantization=quantization)
    return weight_bytes(model)


def test_numbers_count_in_the_models_type(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(30, 10), "b": torch.zeros(7, dtype=torch.float16)}, tmp_path / "m.safetensors", {"x": "y"}
    )
    assert computed(tmp_path) == 307 * 2
    assert computed(tmp_path, torch.float32) == 307 * 4


def test_a_tensor_in_two_files_counts_once(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"a": torch.zeros(100)}, tmp_path / "consolidated.safetensors")
    assert computed(tmp_path) == 200


def test_quantized_numbers_stay_what_they_are(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(100, dtype=torch.uint8), "b": torch.zeros(8, dtype=torch.float8_e4m3fn)}
    save_file(weights, tmp_path / "m.safetensors")
    assert computed(tmp_path, torch.float32) == 108


def test_what_will_be_quantized_counts_as_codes_and_scales(tmp_path: Path) -> None:
    weights = {
        "layers.0.up_proj.weight": torch.zeros(100, 64),
        "layers.0.norm.weight": torch.zeros(64),
        "embed_tokens.weight": torch.zeros(1000, 64),
        "layers.0.mlp.gate.weight": torch.zeros(8, 64),
    }
    save_file(weights, tmp_path / "m.safetensors")
    unquantized = (64 + 1008 * 64) * 2
    assert computed(tmp_path, quantization="int4") == 100 * (32 + 2 * 4) + unquantized
    assert computed(tmp_path, quantization="int8") == 100 * (64 + 2) + unquantized


@pytest.mark.parametrize(
    "experts",
    [
        {f"layers.0.mlp.experts.{expert}.up_proj.weight": torch.zeros(10, 64) for expert in range(4)},
        {"layers.0.mlp.experts.up_proj": torch.zeros(4, 10, 64)},
        {"layers.0.block_sparse_moe.input_linear.weight": torch.zeros(4, 10, 64)},
        {"layers.0.mlp.shared_experts.up_proj.weight": torch.zeros(40, 64)},
    ],
    ids=["one tensor per expert", "one tensor", "one tensor of Granite", "shared experts"],
)
def test_experts_are_quantized_and_their_router_is_not(tmp_path: Path, experts: dict[str, torch.Tensor]) -> None:
    save_file({**experts, "layers.0.mlp.router.weight": torch.zeros(4, 64)}, tmp_path / "m.safetensors")
    assert computed(tmp_path, quantization="int4") == 40 * (32 + 2 * 4) + 4 * 64 * 2
    assert computed(tmp_path, quantization="int8") == 40 * (64 + 2) + 4 * 64 * 2


def test_experts_with_biases_are_in_memory_unquantized_until_all_layers_are_loaded(tmp_path: Path) -> None:
    experts = {"gate_up_proj": torch.zeros(4, 64, 10), "gate_up_proj_bias": torch.zeros(4, 10)}
    save_file({f"layers.0.mlp.experts.{name}": one for name, one in experts.items()}, tmp_path / "m.safetensors")
    assert computed(tmp_path, quantization="int4") == (4 * 64 * 10 + 40) * 2


def test_of_two_layouts_the_one_in_the_index_counts(tmp_path: Path) -> None:
    save_file({"model.a": torch.zeros(100)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"layers.a": torch.zeros(100)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"model.a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert computed(tmp_path) == 200


def test_pickled_weights_count_in_the_models_type_and_nothing_beside_them(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(30, 10, dtype=torch.bfloat16), "b": torch.zeros(6, dtype=torch.int8)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    torch.save({"state": torch.zeros(5000)}, tmp_path / "optimizer.pt")
    assert computed(tmp_path) == 606
    assert computed(tmp_path, torch.float32) == 1206


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_counts_as_it_is_multiplied(tmp_path: Path, tied: bool) -> None:
    """Codes of 5 bits take 8 in memory, and an embedding that is not tied to the head stays in the file."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, rows, kind in (("token_embd", 50, "Q8_0"), ("blk.0.ffn_up", 10, "Q4_1"), ("blk.0.ffn_down", 6, "Q5_0")):
        chosen = gguf.GGMLQuantizationType[kind]
        values = gguf.quantize(np.ones((rows, 64), np.float32), chosen)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=chosen)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stated = {"quant_method": "gguf", "file": str(path), "header": open_model(path).header_digest()}
    config = SimpleNamespace(quantization_config=stated, tie_word_embeddings=tied)
    model: Any = SimpleNamespace(model=str(tmp_path), dtype=torch.bfloat16, quantization="gguf", hf_config=config)
    embedding = 50 * (64 + 2 * 2) if tied else 0
    assert weight_bytes(model) == embedding + 10 * (32 + 2 * 4) + 6 * (64 + 2 * 2) + 64 * 2


def test_without_a_checkpoint_the_size_is_unknown(tmp_path: Path) -> None:
    assert computed(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{", b"too few"])
def test_a_broken_header_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(BackplaneError, match=f"{tmp_path}.* again"):
        computed(tmp_path)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(BackplaneError, match=f"{tmp_path}.* again"):
        computed(tmp_path)


def test_a_broken_pickle_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(BackplaneError, match=f"{tmp_path}.* again"):
        computed(tmp_path)


def test_a_place_that_cannot_be_reached_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert computed(Path("s3://bucket/model")) is None
