"""The GGUF file of a benchmarked shape has the values of its folder, within the precision of its type."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.compare import gguf_files
from benchmarks.compare.subjects import SUBJECTS, TINY, find


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("BACKPLANE_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = TINY.folder(lambda _: None)
        assert TINY.folder(lambda _: pytest.fail("made twice")) == folder
        return folder


def test_a_model_has_the_declared_shape(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    assert {key: config[key] for key in TINY.shape} == dict(TINY.shape)
    weights = load_file(tiny / "model.safetensors")
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (64, 128)
    assert "lm_head.weight" not in weights and config["tie_word_embeddings"]


@pytest.mark.parametrize(("kind", "worst"), [("F32", 0.0), ("F16", 5e-4), ("Q8_0", 1 / 127), ("Q4_0", 1 / 7)])
def test_gguf_round_trip(tiny: Path, tmp_path: Path, kind: str, worst: float) -> None:
    """`worst` is the largest error of the type, as a share of the largest value in a block of 32."""
    file = tmp_path / "model.gguf"
    gguf_files.from_folder(tiny, file, kind)
    reader = gguf.GGUFReader(file)
    assert reader.fields["qwen2.block_count"].contents() == 2
    assert reader.fields["qwen2.attention.head_count_kv"].contents() == 2
    source = load_file(tiny / "model.safetensors")
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == len(source)
    for name, weight in source.items():
        tensor = found[gguf_files.gguf_name(name)]
        expected = weight.to(torch.float32).numpy()
        assert tensor.tensor_type.name == ("F32" if expected.ndim == 1 else kind)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(expected.shape)
        limit = np.abs(expected.reshape(-1, 32)).max(axis=1, keepdims=True) * worst + 1e-7
        assert (np.abs(values - expected).reshape(-1, 32) <= limit).all(), name


def test_another_type_keeps_the_rest_of_the_file(tiny: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    gguf_files.from_folder(tiny, first, "F32")
    gguf_files.requantized(first, second, "Q8_0")
    one, two = gguf.GGUFReader(first), gguf.GGUFReader(second)
    keys = [{name: field.contents() for name, field in reader.fields.items()} for reader in (one, two)]
    assert keys[0] == keys[1]
    assert [tensor.name for tensor in one.tensors] == [tensor.name for tensor in two.tensors]
    assert {tensor.tensor_type.name for tensor in two.tensors} == {"F32", "Q8_0"}


def test_names() -> None:
    assert gguf_files.gguf_name("model.layers.12.self_attn.o_proj.weight") == "blk.12.attn_output.weight"
    assert gguf_files.gguf_name("model.embed_tokens.weight") == "token_embd.weight"


def test_parameters_are_as_many_as_the_name_states(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts parameters by the formula of the architecture; the published sizes are 0.494 and 1.544 billion."""
    for subject, billions in zip(SUBJECTS[1:], (0.494, 1.544), strict=True):
        shape = subject.shape
        hidden, wide = shape["hidden_size"], shape["intermediate_size"]
        kv = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
        layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * wide + (hidden + 2 * kv) + 2 * hidden
        count = shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden + hidden
        assert count / 1e9 == pytest.approx(billions, abs=0.001)
    monkeypatch.setattr(type(TINY), "folder", lambda _self, _progress: tiny)
    expected = sum(weight.numel() for weight in load_file(tiny / "model.safetensors").values())
    assert TINY.parameters(lambda _: None) == expected
    assert TINY.kv_bytes_per_token(lambda _: None) == 2 * 2 * 2 * 32 * 4


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown model"):
        find("7b")
