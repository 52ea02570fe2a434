"""Tests that layers of an adapter which the model lacks are reported, also if only some layers can take an adapter."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_backplane.lora.validation import mismatches, rank_mismatches


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.ModuleDict({"qkv_proj": torch.nn.Identity(), "o_proj": torch.nn.Identity()})


def stage(first: int, last: int) -> torch.nn.Module:
    """Returns one pipeline stage of a model of four layers, with vLLM's placeholders for the layers of other stages."""
    layers = [Layer() if first <= place <= last else PPMissingLayer() for place in range(4)]
    ends = {"embed_tokens": PPMissingLayer() if first else torch.nn.Identity()}
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers), **ends})})


def reported(
    model: torch.nn.Module, name: str, *, stages: int = 1, chosen: Any = None, pooling: bool = False
) -> list[str]:
    """Returns the mismatches of an adapter for layer `name`. Only one layer of the model can take an adapter."""
    held = "model.layers.1.self_attn.qkv_proj"
    manager: Any = SimpleNamespace(
        model=model,
        modules={held: SimpleNamespace(base_layer=None)},
        lora_config=SimpleNamespace(target_modules=chosen),
        is_pooling_model=pooling,
    )
    factors = SimpleNamespace(lora_a=None, lora_b=None)
    adapter: Any = SimpleNamespace(loras={held: factors, name: factors})
    parallel: Any = SimpleNamespace(pipeline_parallel_size=stages)
    return list(mismatches(manager, adapter, [8], parallel))


O_PROJ = "model.layers.{}.self_attn.o_proj"
DEEPER = O_PROJ.format(4)
QUERY = "model.layers.1.self_attn.query"


@pytest.mark.parametrize(
    ("model", "name", "more"),
    [
        (stage(0, 3), DEEPER, {}),
        (stage(0, 1), DEEPER, {"stages": 2}),
        (stage(2, 3), DEEPER, {"stages": 2}),
        (stage(0, 3), DEEPER, {"chosen": ["qkv_proj"]}),
        (stage(2, 3), DEEPER, {"stages": 2, "chosen": ["qkv_proj"]}),
        (stage(0, 1), QUERY, {"stages": 2}),
        (stage(0, 3), "transformer.h.1.attn", {"chosen": ["qkv_proj"]}),
        (stage(0, 3), "layers.4.self_attn.o_proj", {"chosen": ["qkv_proj"], "pooling": True}),
    ],
)
def test_a_layer_that_the_model_lacks_is_reported(model: torch.nn.Module, name: str, more: Any) -> None:
    assert reported(model, name, **more) == [f"the model has no layer {name!r} that takes an adapter"]


@pytest.mark.parametrize(
    ("model", "name", "more"),
    [
        (stage(0, 1), O_PROJ.format(3), {"stages": 2}),
        (stage(2, 3), "model.embed_tokens", {"stages": 2}),
        (stage(0, 3), O_PROJ.format(3), {"chosen": ["qkv_proj"]}),
        (stage(0, 3), "model.layers.3.self_attn.q_proj", {"chosen": ["o_proj"]}),
        (stage(0, 1), O_PROJ.format(3), {"stages": 2, "chosen": ["qkv_proj"]}),
        (stage(0, 3), "layers.3.self_attn.o_proj", {"chosen": ["qkv_proj"], "pooling": True}),
    ],
)
def test_what_another_stage_has_or_the_user_left_out_is_not(model: torch.nn.Module, name: str, more: Any) -> None:
    assert reported(model, name, **more) == []


@pytest.mark.skipif(
    "rank_pattern" not in {field.name for field in dataclasses.fields(PEFTHelper)}, reason="patterns: since vLLM 0.32"
)
@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({}, []),
        ({r"layers\.0\.q": 4}, []),
        ({"q": 4}, ["layers.1.q: lora_A has the rank 8, but rank_pattern in adapter_config.json requires 4"]),
        ({"v": 8}, ["layers.0.q: lora_A has the rank 4, but rank_pattern in adapter_config.json requires 8"]),
    ],
)
def test_a_layer_has_the_rank_of_its_pattern(tmp_path: Path, patterns: dict[str, int], expected: list[str]) -> None:
    """vLLM scales a layer by the rank of the description, so that another rank of its tensors changes the outputs."""
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q"], "rank_pattern": patterns}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, rank in (("layers.0.q", 4), ("layers.1.q", 8)):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(rank, 16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(16, rank)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert list(rank_mismatches(str(tmp_path))) == expected
