"""Tests that tensors missing from a quantized checkpoint are named, through vLLM's own model loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scheme_checkpoints as made
import torch
from safetensors.torch import save_file
from scheme_layers import FAN_IN, configured
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader as upstream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
from vllm.model_executor.models.utils import AutoWeightsLoader

from vllm_backplane.errors import CheckpointError
from vllm_backplane.weights import missing_weights

UNNOTICED = pytest.mark.skipif(
    "quantized" not in signature(DefaultModelLoader.track_weights_loading).parameters,
    reason="vLLM 0.30 and 0.31 do not report a missing embedding or head of a quantized checkpoint",
)
PARTS = {"q": ("q_proj", 32), "k": ("k_proj", 16), "v": ("v_proj", 16)}


@pytest.fixture(autouse=True)
def _alone(one_worker: None) -> None:
    """Initializes a group of one worker: parameters read their rank."""


class Small(torch.nn.Module):
    """Builds a model with one layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        chosen = configured(made.GPTQ)
        chosen.packed_modules_mapping = {"qkv_proj": [name for name, _ in PARTS.values()]}
        self.embed_tokens = VocabParallelEmbedding(64, FAN_IN, quant_config=chosen, prefix="embed_tokens")
        self.qkv_proj = QKVParallelLinear(FAN_IN, 8, 4, 2, bias=True, quant_config=chosen, prefix="qkv_proj")
        self.norm = RMSNorm(FAN_IN)
        self.lm_head = ParallelLMHead(64, FAN_IN, quant_config=chosen, prefix="lm_head")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own, loaded = dict(self.named_parameters()), set()
        others = []
        for name, tensor in weights:
            layer, _, last = name.rpartition(".")
            shard = next((shard for shard, (part, _) in PARTS.items() if part == layer), None)
            if shard is None:
                others.append((name, tensor))
            else:
                own[f"qkv_proj.{last}"].weight_loader(own[f"qkv_proj.{last}"], tensor, shard)
                loaded.add(f"qkv_proj.{last}")
        return loaded | AutoWeightsLoader(self).load_weights(others)


def load(folder: Path, missing: Iterable[str], **extra_config: bool) -> None:
    """Loads a checkpoint as the worker does. The file has its tensors in the order of their names."""
    tensors = {
        "embed_tokens.weight": torch.zeros(64, FAN_IN),
        "norm.weight": torch.zeros(FAN_IN),
        "lm_head.weight": torch.zeros(64, FAN_IN),
    }
    for part, width in PARTS.values():
        stored = made.gptq(FAN_IN, width, 4, 32).tensors | {"bias": torch.zeros(width)}
        tensors |= {f"{part}.{last}": tensor for last, tensor in stored.items()}
    save_file({name: one for name, one in tensors.items() if name not in missing}, folder / "model.safetensors")
    config: Any = SimpleNamespace(
        load_config=LoadConfig(use_tqdm_on_load=False, model_loader_extra_config=dict(extra_config)),
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            quantization="auto_gptq",
            convert_type="none",
            dtype=torch.float32,
            is_moe=False,
            multimodal_config=None,
        ),
        speculative_config=None,
    )
    missing_weights.track_loaded_weights(config)
    with missing_weights.error_with_remedy():
        model = Small()
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        finalize_layerwise_processing(model, config.model_config)
    assert model.qkv_proj.weight.dtype in (torch.uint8, torch.int8)


def test_a_complete_checkpoint_is_loaded(tmp_path: Path) -> None:
    load(tmp_path, ())


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param(["embed_tokens.weight"], marks=UNNOTICED),
        ["norm.weight"],
        pytest.param(["lm_head.weight"], marks=UNNOTICED),
        pytest.param(["embed_tokens.weight", "norm.weight"], marks=UNNOTICED),
        ["k_proj.bias"],
        ["k_proj.bias", "q_proj.bias", "v_proj.bias"],
        ["v_proj.scales"],
    ],
    ids=" ".join,
)
def test_what_is_missing_is_named(tmp_path: Path, missing: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"the checkpoint has no .*; choose a complete one") as error:
        load(tmp_path, missing)
    assert all(name in str(error.value) for name in missing)


def test_a_user_may_do_without_the_check(tmp_path: Path) -> None:
    load(tmp_path, ["norm.weight"], enable_weights_track=False)


def test_another_error_is_left_as_it_is() -> None:
    with pytest.raises(ValueError, match="another"), missing_weights.error_with_remedy():
        raise ValueError("another")


def test_the_option_is_given_to_the_loader_that_has_it() -> None:
    """Every other loader of vLLM refuses the option."""
    known = upstream._LOAD_FORMAT_TO_MODEL_LOADER
    default = {name for name, loader in known.items() if issubclass(loader, DefaultModelLoader)}
    assert default - set(missing_weights.FORMATS) == set()
    assert set(missing_weights.FORMATS) & set(known) <= default


def is_tracked(
    quantization: str | None,
    drafts: Callable[[Any], Any] | None = None,
    load_format: str = "auto",
    convert: str = "none",
) -> bool:
    target = SimpleNamespace(quantization=quantization, convert_type=convert)
    drafting = drafts and SimpleNamespace(target_model_config=target, draft_model_config=drafts(target))
    config: Any = SimpleNamespace(
        model_config=target, load_config=LoadConfig(load_format=load_format), speculative_config=drafting
    )
    missing_weights.track_loaded_weights(config)
    return bool(config.load_config.model_loader_extra_config)


def test_which_checkpoints_are_compared() -> None:
    assert (
        is_tracked("auto_awq")
        and is_tracked("compressed-tensors")
        and is_tracked("int8")
        and is_tracked("gptq", load_format="pt")
    )
    assert not is_tracked("gguf"), "its loader checks this itself"
    assert not is_tracked(None), "vLLM checks this itself"
    assert not is_tracked("auto_awq", load_format="dummy")
    assert not is_tracked("auto_awq", convert="classify"), "vLLM does not count the bias of the head that it adds"
    # A draft head takes its embedding from the target model. n-gram drafts have the target model's configuration.
    assert not is_tracked("auto_awq", lambda _target: SimpleNamespace(quantization="auto_awq"))
    assert is_tracked("auto_awq", lambda _target: SimpleNamespace(quantization=None))
    assert is_tracked("auto_awq", lambda target: target)
