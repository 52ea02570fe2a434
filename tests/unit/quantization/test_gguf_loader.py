"""Tests the load format `gguf`: tensors of the file reach the model, and missing ones are errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf.architectures import checkpoint_tensors
from vllm_backplane.gguf.file import GgufFile
from vllm_backplane.gguf.lazy_tensor import LazyTensor, named_tensors
from vllm_backplane.gguf.model_files import open_model
from vllm_backplane.quantization.gguf.loader import GgufModelLoader


class Small(torch.nn.Module):
    """Loads by name, as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        norms = ("model_norm_weight", "model_layers_0_input_layernorm_weight")
        for name in norms:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(4)))
        self.blocks = torch.nn.Parameter(torch.empty(2, 32, device="meta"))
        self.seen: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            self.seen[name] = weight
            own = dict(self.named_parameters()).get(name.replace(".", "_"))
            if own is not None:
                own.data.copy_(weight)
                loaded.add(name.replace(".", "_"))
        return loaded


def write(path: Path, *norms: str) -> Any:
    writer = gguf.GGUFWriter(path, "gemma")
    writer.add_head_count(1)
    kind = gguf.GGMLQuantizationType.Q8_0
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quantize(values, kind), raw_dtype=kind)
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.arange(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantization_config = {"quant_method": "gguf", "file": str(path), "header": open_model(path).header_digest()}
    return SimpleNamespace(model=str(path), hf_config=SimpleNamespace(quantization_config=quantization_config))


def load(model: torch.nn.Module, config: Any) -> None:
    GgufModelLoader(LoadConfig(load_format="gguf", use_tqdm_on_load=False)).load_weights(model, config)


def test_tensors_arrive_by_name_and_blocks_stay_blocks(tmp_path: Path) -> None:
    model = Small()
    load(model, write(tmp_path / "m.gguf", "output_norm", "blk.0.attn_norm"))
    assert model.model_norm_weight.tolist() == [-1, 0, 1, 2], "Gemma's norms have a 1 too much in files"
    up = model.seen["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(up, LazyTensor) and up.kind.name == "Q8_0" and up.rows.shape == (2, 34)
    expected = torch.linspace(-1, 1, 64).view(2, 32)
    torch.testing.assert_close(up + 0, expected, rtol=0, atol=0.005)
    assert type(up + 0) is torch.Tensor
    stacked = up.unsqueeze(0)
    assert isinstance(stacked, LazyTensor) and stacked.shape == (1, 2, 32)
    assert all(isinstance(one, LazyTensor) for one in stacked.unbind())


@pytest.mark.parametrize("shape", [(32,), (1, 32)])
def test_a_matrix_of_one_row_may_be_a_vector(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Older converters wrote the gate of a shared expert as a vector."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2moe")
    writer.add_tensor("blk.0.ffn_gate_inp_shexp.weight", np.arange(32, dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [(name, weight)] = [
        pair for one in checkpoint_tensors(open_model(tmp_path / "m.gguf")) for pair in named_tensors(one)
    ]
    assert name == "model.layers.0.mlp.shared_expert_gate.weight"
    assert (weight + 0).tolist() == [list(range(32))]


def test_what_the_file_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights for model_layers_0_input_layernorm_weight"):
        load(Small(), write(tmp_path / "m.gguf", "output_norm"))


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(model="folder", hf_config=SimpleNamespace())
    with pytest.raises(BackplaneError, match="folder is not a GGUF file; remove the option"):
        load(Small(), config)


@pytest.mark.parametrize("locked", [False, True])
def test_pages_that_were_read_are_given_back_unless_memory_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """The system refuses to take back locked pages, and that error would end the loading."""
    model, libc, given_back = Small(), ctypes.CDLL(None), []
    path = tmp_path / "m.gguf"
    config = write(path, "output_norm", "blk.0.attn_norm")

    def place() -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
        rows = cast(LazyTensor, model.seen["model.layers.0.mlp.up_proj.weight"]).rows
        return ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(1)

    def load_weights_alone(loader: Any, _vllm_config: Any, model_config: Any, _prefix: str) -> torch.nn.Module:
        loader.load_weights(model, model_config)
        if locked and libc.mlock(*place()) != 0:
            pytest.skip("this process may lock no memory (ulimit -l)")
        return model

    def recorded(file: GgufFile, forget: Callable[[GgufFile], None] = GgufFile.forget_pages) -> None:
        forget(file)
        given_back.append(file.path)

    monkeypatch.setattr(BaseModelLoader, "load_model", load_weights_alone)
    monkeypatch.setattr(GgufFile, "forget_pages", recorded)
    loader = GgufModelLoader(LoadConfig(load_format="gguf", use_tqdm_on_load=False))
    try:
        assert loader.load_model(cast(Any, None), config) is model
    finally:
        if locked:
            libc.munlock(*place())
    assert given_back == ([] if locked else [path])
