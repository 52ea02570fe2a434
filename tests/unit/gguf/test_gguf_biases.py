"""Biases of a GGUF file are reordered like the rows of their weight, and a bias that vLLM would ignore is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from test_gguf_description import write

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.architectures import checkpoint_tensors
from vllm_backplane.gguf.hf_config import configuration
from vllm_backplane.gguf.lazy_tensor import named_tensors
from vllm_backplane.gguf.model_files import open_model

HEADS, HEAD, WIDTH = 4, 16, 32


def converted(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reorders rows of Q and K, and their biases, as llama.cpp's converter does: the halves of a head become pairs."""
    return values.reshape(HEADS, 2, HEAD // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q8_0], ids=lambda kind: kind.name)
def test_those_of_queries_and_keys_are_put_in_order(tmp_path: Path, kind: Type) -> None:
    writer, random, held = gguf.GGUFWriter(tmp_path / "m.gguf", "llama"), np.random.default_rng(0), {}
    writer.add_head_count(HEADS)
    for name, shape in (("weight", (HEADS * HEAD, WIDTH)), ("bias", (HEADS * HEAD,))):
        raw = gguf.quantize(converted(random.standard_normal(shape).astype(np.float32)), kind)
        writer.add_tensor(f"blk.0.attn_k.{name}", raw, raw_dtype=kind)
        held[f"model.layers.0.self_attn.k_proj.{name}"] = gguf.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = dict(pair for one in checkpoint_tensors(open_model(tmp_path / "m.gguf")) for pair in named_tensors(one))
    assert found.keys() == held.keys()
    for name, tensor in found.items():
        loaded = torch.zeros(tensor.shape).copy_(tensor).numpy()
        assert np.array_equal(converted(loaded), held[name]) and not np.array_equal(loaded, held[name]), name


QKV = {"blk.0.attn_q.bias": (32,), "blk.0.attn_k.bias": (16,), "blk.0.attn_v.bias": (16,)}
GATED = {"blk.0.ffn_gate.bias": (64,), "blk.0.ffn_up.bias": (64,), "blk.0.ffn_down.bias": (32,)}


@pytest.mark.parametrize(
    ("tensors", "flags"),
    [
        ({}, (False, False, False)),
        (QKV, (True, False, False)),
        ({"blk.0.attn_output.bias": (32,)}, (False, True, False)),
        ({**QKV, **GATED, "blk.0.attn_output.bias": (32,)}, (True, True, True)),
    ],
)
def test_the_configuration_names_the_biases_that_exist(tmp_path: Path, tensors: Any, flags: tuple[bool, ...]) -> None:
    """In vLLM's Llama, attention_bias applies only to the output projection if the configuration has qkv_bias."""
    config = configuration(open_model(write(tmp_path / "m.gguf", tensors=tensors)))
    assert (config["qkv_bias"], config["attention_bias"], config["mlp_bias"]) == flags


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "blk.0.attn_norm.bias"),
        ("llama", "output.bias"),
        ("qwen3", "blk.0.attn_output.bias"),
        ("gemma", "blk.0.attn_q.bias"),
    ],
)
def test_one_that_the_model_would_pass_over_is_refused(tmp_path: Path, architecture: str, name: str) -> None:
    model = open_model(write(tmp_path / "m.gguf", architecture, tensors={name: (32,)}))
    with pytest.raises(CheckpointError, match=f"a tensor '{name}', which is not part of architecture '{architecture}'"):
        list(checkpoint_tensors(model))


def test_experts_beside_attention_with_biases_are_refused(tmp_path: Path) -> None:
    """Files of Mixtral have the architecture "llama", and vLLM's Mixtral has no biases."""
    dense = dict.fromkeys(("blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"))
    model = open_model(write(tmp_path / "m.gguf", tensors={**QKV, **dense}, expert_count=2))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.bias"):
        list(checkpoint_tensors(model))


def test_one_of_three_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no blk\.0\.ffn_down\.bias"):
        configuration(open_model(write(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.bias": (64,)})))
