"""Makes LoRA adapters in PEFT's format: valid ones, which are strong enough to change outputs, and broken ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "v_proj", "o_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TENSORS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapter:
    """Holds an adapter's folder, and the factors of each linear layer by the layer's name in the transformers model."""

    folder: Path
    rank: int
    alpha: int
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def merge(self, model: Any) -> None:
        """Adds the adapter to the weights of `model`."""
        for name, (a, b) in self.factors.items():
            model.get_submodule(name).weight.data.addmm_(b, a, alpha=self.alpha / self.rank)


def make(folder: Path, model: Any, rank: int, modules: tuple[str, ...], strength: float, seed: int) -> Adapter:
    """Makes an adapter from random factors whose product is `strength` times as large as the weights."""
    generator = torch.Generator().manual_seed(seed)
    alpha = 2 * rank  # the scale alpha / rank must not be one
    factors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules:
            outputs, inputs = module.weight.shape
            size = strength * float(module.weight.detach().norm()) / (alpha / rank * (rank * inputs * outputs) ** 0.5)
            a = torch.randn(rank, inputs, generator=generator)
            factors[name] = a, size * torch.randn(outputs, rank, generator=generator)
    write(folder, rank, alpha, factors, modules)
    return Adapter(folder, rank, alpha, factors)


def write(
    folder: Path,
    rank: int,
    alpha: int,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    modules: tuple[str, ...],
) -> None:
    """Writes an adapter to a new folder in PEFT's format."""
    folder.mkdir()
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(description))
    tensors = {}
    for name, (a, b) in factors.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / TENSORS)


def _for_layer(
    layer: str, rank: int, inputs: int, outputs: int, *, described: int | None = None
) -> Callable[[Path], None]:
    """Returns a function that writes an adapter of one layer; `described` is the rank in adapter_config.json."""
    factors = {layer: (torch.ones(rank, inputs), torch.ones(outputs, rank))}
    return lambda folder: write(folder, described or rank, 2 * rank, factors, (layer.rpartition(".")[2],))


def _truncated(sound: Callable[[Path], None], folder: Path) -> None:
    sound(folder)
    whole = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(whole[: len(whole) // 2])


def _one_factor(sound: Callable[[Path], None], folder: Path) -> None:
    sound(folder)
    tensors = load_file(folder / TENSORS)
    save_file({name: tensor for name, tensor in tensors.items() if "lora_A" in name}, folder / TENSORS)


def _no_description(sound: Callable[[Path], None], folder: Path) -> None:
    sound(folder)
    (folder / "adapter_config.json").write_text("{not json")


def _pipe(sound: Callable[[Path], None], folder: Path) -> None:
    sound(folder)
    (folder / TENSORS).unlink()
    os.mkfifo(folder / TENSORS)


def _with_value(value: float, width: int) -> Callable[[Path], None]:
    """Returns a function that writes an adapter with one value that is not a finite number."""

    def make(folder: Path) -> None:
        b = torch.ones(width, 8)
        b[5, 3] = value
        write(folder, 8, 16, {Q: (torch.ones(8, width), b)}, ("q_proj",))

    return make


def _with_pattern(ranks: dict[str, int], sound: Callable[[Path], None], folder: Path) -> None:
    """Writes an adapter with ranks by pattern of module names."""
    sound(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": ranks}))


Q = "model.layers.3.self_attn.q_proj"


def broken(width: int) -> dict[str, tuple[Callable[[Path], None], str]]:
    """Returns broken adapters by name for a model of this hidden size with at least 4 and at most 30 layers: the
    function that writes the adapter, and a part of the expected error message."""
    sound = _for_layer(Q, 8, width, width)
    return {
        "a rank over the limit": (_for_layer(Q, 128, width, width), "LoRA rank 128 is greater than max_lora_rank 64"),
        "another rank than in adapter_config.json": (
            _for_layer(Q, 16, width, width, described=8),
            f"lora_A is (16, {width})",
        ),
        "a rank that is over the limit in the file alone": (
            _for_layer(Q, 128, width, width, described=8),
            f"adapter_config.json require (8, {width}) and ({width}, 8)",
        ),
        "made for a smaller model": (_for_layer(Q, 8, 64, 64), "lora_A is (8, 64) and lora_B (64, 8)"),
        "made for a larger model": (_for_layer(Q, 8, 2048, 2048), "lora_A is (8, 2048)"),
        "made for a deeper model": (
            _for_layer("model.layers.30.self_attn.o_proj", 8, width, width),
            "the model has no layer 'model.layers.30.self_attn.o_proj'",
        ),
        "an unknown module": (_for_layer("model.layers.3.self_attn.query", 8, width, width), "self_attn.query"),
        "a truncated file": (partial(_truncated, sound), "Error while deserializing header"),
        "one factor without the other": (partial(_one_factor, sound), "self_attn.q_proj.lora_B.weight' is missing"),
        "an adapter_config.json that is not JSON": (partial(_no_description, sound), "Expecting property name"),
        "a file instead of a folder": (Path.touch, "is not a folder; give the folder of the adapter"),
        "an adapter_config.json that is a folder": (
            lambda folder: (folder / "adapter_config.json").mkdir(parents=True),
            "adapter_config.json is not a regular file",
        ),
        "weights that are a pipe": (partial(_pipe, sound), "adapter_model.safetensors is not a regular file"),
        "NaN": (_with_value(float("nan"), width), "lora_B has NaN or infinite values"),
        "an infinite weight": (_with_value(float("inf"), width), "lora_B has NaN or infinite values"),
        "a rank over the limit in a pattern": (partial(_with_pattern, {"q_proj": 512}, sound), "rank 512 for 'q_proj'"),
        "a pattern that takes years": (
            partial(_with_pattern, {"(a+)+b": 8}, sound),
            "'(a+)+b', which is not a pattern of module names",
        ),
    }


BROKEN = tuple(broken(8))
"""The names of broken adapters."""
