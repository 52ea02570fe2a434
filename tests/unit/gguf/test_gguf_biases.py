"""Biases of a GGUF file: in the order of the weight's rows, and none that the model would pass over."""

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
from vllm_backplane.gguf.architectures import named
from vllm_backplane.gguf.configuration import configuration
from vllm_backplane.gguf.lazy_tensor import weights
from vllm_backplane.gguf.model_files import opened

HEADS, HEAD, WIDTH = 4, 16, 32


def converted(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter makes of the rows of Q and K, and of their biases: pairs, of the halves of a head."""
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
    found = dict(pair for one in named(opened(tmp_path / "m.gguf")) for pair in weights(one))
    assert found.keys() == held.keys()
    for name, tensor in found.items():
        loaded = torch.zeros(tensor.shape).copy_(tensor).numpy()
        assert np.array_equal(converted(loaded), held[name]) and not np.array_equal(loaded, held[name]), name


QKV = {"blk.0.attn_q.bias": (32,), "blk.0.attn_k.bias": (16,), "blk.0.attn_v.bias": (16,)}
GATED = {"blk.0.ffn_gate.bias": (64,), "blk.0.ffn_up.bias": (64,), "blk.0.ffn_down.bias": (32,)}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, (False, False, False)),
        (QKV, (True, False, False)),
        ({"blk.0.attn_output.bias": (32,)}, (False, True, False)),
        ({**QKV, **GATED, "blk.0.attn_output.bias": (32,)}, (True, True, True)),
    ],
)
def test_vllm_is_told_which_there_are(tmp_path: Path, tensors: Any, said: tuple[bool, ...]) -> None:
    """In vLLM's Llama, the word for attention is the output's alone where there is one for queries, keys and values."""
    made = configuration(opened(write(tmp_path / "m.gguf", tensors=tensors)))
    assert (made["qkv_bias"], made["attention_bias"], made["mlp_bias"]) == said


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
    model = opened(write(tmp_path / "m.gguf", architecture, tensors={name: (32,)}))
    with pytest.raises(CheckpointError, match=f"a tensor '{name}', which models of architecture '{architecture}'"):
        list(named(model))


def test_experts_beside_attention_with_biases_are_refused(tmp_path: Path) -> None:
    """Files of Mixtral say llama, and vLLM's Mixtral has no biases."""
    dense = dict.fromkeys(("blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"))
    model = opened(write(tmp_path / "m.gguf", tensors={**QKV, **dense}, expert_count=2))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.bias"):
        list(named(model))


def test_one_of_three_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no blk\.0\.ffn_down\.bias"):
        configuration(opened(write(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.bias": (64,)})))
