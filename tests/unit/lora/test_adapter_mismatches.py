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
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_backplane.lora import validation
from vllm_backplane.lora.adapter_files import UnusableFiles
from vllm_backplane.lora.validation import mismatches, rank_mismatches, refuse_repeated_values


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


def test_a_long_name_is_shortened() -> None:
    [text] = reported(stage(0, 3), "n" * 100_000)
    assert len(text) < 200


class Linear(LinearBase):
    """Stands in for a layer of vLLM with 64 inputs and outputs, without its weights."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.input_size = self.output_size = 64


def of_factors(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    """Returns the mismatches of an adapter with two factors for the only layer of a model."""
    manager: Any = SimpleNamespace(
        modules={"q": SimpleNamespace(base_layer=Linear())}, lora_config=SimpleNamespace(target_modules=None)
    )
    adapter: Any = SimpleNamespace(loras={"q": SimpleNamespace(lora_a=a, lora_b=b)})
    parallel: Any = SimpleNamespace(pipeline_parallel_size=1)
    return list(mismatches(manager, adapter, [8], parallel))


HUGE = torch.zeros(1).expand(8, 1 << 34)
"""A tensor that repeats one value, as a pickled file can describe it."""
SOUND_A, SOUND_B = torch.zeros(8, 64), torch.zeros(64, 8)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (SOUND_A, SOUND_B, None),
        (HUGE, SOUND_B, "'q': lora_A is (8, 17179869184)"),
        (torch.zeros(()), SOUND_B, "'q': lora_A is ()"),
        (torch.zeros(0, 64), torch.zeros(64, 0), "'q': lora_A is (0, 64)"),
        (torch.full((8, 64), float("inf")), SOUND_B, "'q': lora_A has NaN or infinite values"),
        (SOUND_A, torch.full((64, 8), float("nan")), "'q': lora_B has NaN or infinite values"),
    ],
)
def test_shapes_are_compared_before_values(a: torch.Tensor, b: torch.Tensor, expected: str | None) -> None:
    faults = of_factors(a, b)
    assert [fault[: len(expected or "")] for fault in faults] == ([] if expected is None else [expected])


def test_values_are_examined_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def isfinite(piece: torch.Tensor) -> torch.Tensor:
        sizes.append(piece.numel())
        return ~(piece.isnan() | piece.isinf())

    monkeypatch.setattr(torch, "isfinite", isfinite)
    monkeypatch.setattr(validation, "_PIECE", 100)
    last = SOUND_B.clone()
    last[-1, -1] = float("nan")
    assert of_factors(SOUND_A, last) == ["'q': lora_B has NaN or infinite values"]
    assert sum(sizes) == SOUND_A.numel() + SOUND_B.numel() and max(sizes) <= 100


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
@pytest.mark.parametrize("archive", [True, False])
def test_a_pickled_tensor_that_repeats_values_is_refused(tmp_path: Path, name: str, archive: bool) -> None:
    """vLLM would convert it into a tensor of its own type with memory for each value."""

    def save(contents: Any) -> None:
        torch.save(contents, tmp_path / name, _use_new_zipfile_serialization=archive)

    save({"lora_A": torch.zeros(8, 64), "step": 7})
    refuse_repeated_values(str(tmp_path))
    save([torch.zeros(8, 64)])
    refuse_repeated_values(str(tmp_path))
    for contents in ({"lora_A": HUGE}, dict.fromkeys(map(str, range(100)), torch.zeros(8, 640))):
        save(contents)
        with pytest.raises(UnusableFiles, match=rf"the tensors in {name} have \d+ bytes, more than the file"):
            refuse_repeated_values(str(tmp_path))
    save_file({"lora_A": torch.zeros(8, 64)}, tmp_path / "adapter_model.safetensors")
    refuse_repeated_values(str(tmp_path))  # vLLM reads this file and not the other one


@pytest.mark.skipif(
    "rank_pattern" not in {field.name for field in dataclasses.fields(PEFTHelper)}, reason="patterns: since vLLM 0.32"
)
@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({}, []),
        ({r"layers\.0\.q": 4}, []),
        ({"q": 4}, ["'layers.1.q': lora_A has the rank 8, but rank_pattern in adapter_config.json requires 4"]),
        ({"v": 8}, ["'layers.0.q': lora_A has the rank 4, but rank_pattern in adapter_config.json requires 8"]),
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


@pytest.mark.skipif(
    "rank_pattern" not in {field.name for field in dataclasses.fields(PEFTHelper)}, reason="patterns: since vLLM 0.32"
)
def test_a_number_has_no_rank(tmp_path: Path) -> None:
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q"], "rank_pattern": {"q": 8}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    factors = {f"base_model.model.layers.0.q.lora_{letter}.weight": torch.tensor(1.0) for letter in "AB"}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    assert list(rank_mismatches(str(tmp_path))) == [
        "'layers.0.q': lora_A has the rank 0, but rank_pattern in adapter_config.json requires 8"
    ]
