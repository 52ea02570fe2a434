"""Defines the fuzz target of LoRA adapters: adapter_config.json and the weights in the folder that a request names."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fuzz.campaign import Target
from tests.fuzz.targets import framed
from tests.fuzz.targets.worker import prepare_worker

RANK = 16
SIZE = 16
"""Inputs and outputs of the layers of the model."""
IMPORTS = ("vllm.config", "vllm.lora.lora_model", "vllm_backplane.lora.validation")


class Refused(Exception):
    """Reports that vLLM or safetensors refused the adapter, with a type of error by which they refuse values."""


def load_adapter(data: bytes) -> None:
    """Checks the files of an adapter, loads it as vLLM does, and compares its factors with the tensors in the file."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load
    from vllm.config import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    from vllm_backplane.lora.adapter_files import CONFIG, WEIGHTS, require_loadable
    from vllm_backplane.lora.validation import rank_mismatches

    config, weights = framed.split(data)
    folder = Path(tempfile.gettempdir())
    (folder / CONFIG).write_bytes(config)
    (folder / WEIGHTS[0]).write_bytes(weights)
    require_loadable(str(folder), RANK)
    try:
        helper = PEFTHelper.from_local_dir(str(folder), 64)
        helper.validate_legal(LoRAConfig(max_lora_rank=RANK, max_loras=1))
        loaded = LoRAModel.from_local_checkpoint(
            str(folder), {"q_proj", "v_proj"}, helper, lora_model_id=1, device="cpu", dtype=None
        )
    except (ValueError, SafetensorError) as fault:
        raise Refused(repr(fault)) from fault
    if faults := [*rank_mismatches(str(folder)), *_mismatches(loaded, helper)]:
        raise Refused(faults)
    stored = load(weights)
    assert len(stored) == 2 * len(loaded.loras), "tensors were ignored"
    for name, layer in loaded.loras.items():
        for factor, loaded_factor in (("A", layer.lora_a), ("B", layer.lora_b)):
            expected = stored[f"base_model.model.{name}.lora_{factor}.weight"]
            assert torch.equal(loaded_factor, expected), f"another lora_{factor} of {name}"
        assert layer.rank == len(layer.lora_a) == layer.lora_b.shape[1], name


def _mismatches(loaded: Any, helper: Any) -> list[str]:
    """Returns what the worker finds wrong when it compares an adapter with a model that has both layers."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from vllm_backplane.lora.validation import mismatches

    layer = SimpleNamespace(base_layer=ReplicatedLinear(SIZE, SIZE, bias=False))
    manager: Any = SimpleNamespace(
        lora_config=SimpleNamespace(target_modules=None),
        modules={f"model.layers.0.self_attn.{name}_proj": layer for name in ("q", "v")},
        model=None,
    )
    parallel: Any = SimpleNamespace(pipeline_parallel_size=1)
    return list(mismatches(manager, loaded, [helper.r, *helper.rank_pattern.values()], parallel))


def targets() -> list[Target]:
    """Returns the targets of this file."""
    from vllm_backplane.lora.adapter_files import UnusableFiles

    covered = ("vllm_backplane/lora", "vllm/lora/peft_helper", "vllm/lora/lora_model")
    return [
        Target(
            "adapter",
            load_adapter,
            (UnusableFiles, Refused),
            covered,
            mutate=framed.mutate,
            imports=IMPORTS,
            prepare=prepare_worker,
        )
    ]
