"""Layers whose tensors are collected until all have come, and those among them that the checkpoint does not have.

vLLM's loading by layers gives a tensor that never comes memory of any content, and its own check of what was loaded
(`track_weights_loading`) leaves such layers out: their parameters are exchanged for others while they are loaded. So
each insists on what it needs itself, part by part where several are fused, before it packs or quantizes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import BoundArguments
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing

from vllm_backplane.errors import CheckpointError

QKV = {"q": 0, "k": 1, "v": 2}
"""Parts of a fused layer by the names that vLLM has for them."""


def collect(layer: torch.nn.Module, prefix: str, parts: int, fused: Mapping[str, list[str]]) -> None:
    """What comes for the layer's parameters is collected from now on. `fused` names its `parts` in the checkpoint, by
    the last part of the layer's own name."""
    initialize_online_processing(layer)
    layer.backplane_must_be_loaded = get_current_vllm_config().load_config.load_format != "dummy"
    layer.backplane_stored = _stored(prefix, parts, fused)  # type: ignore[assignment]


def collect_bias(layer: torch.nn.Module) -> None:
    """vLLM makes a bias after all other parameters of a layer, and would not collect what comes for it first."""
    if hasattr(layer, "backplane_stored") and getattr(layer, "bias", None) is not None:
        initialize_online_processing(layer)
        layer.backplane_bias_is_collected = True  # type: ignore[assignment]


def insist_on_loaded(layer: Any, needed: tuple[str, ...]) -> None:
    """Of the parameters `needed`, and a bias, all parts have come."""
    info = get_layerwise_info(layer)
    if not getattr(layer, "backplane_must_be_loaded", False) or not info.can_load():
        return
    parts: tuple[str, ...] = layer.backplane_stored
    if info.load_numel == 0:
        name = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
        raise CheckpointError(f"the checkpoint has no weights for {name}; choose a complete one")
    if getattr(layer, "backplane_bias_is_collected", False):
        needed += ("bias",)
    loaded = {(name, part) for name, call in info.loaded_weights for part in _parts(call, len(parts))}
    missing = [f"{stored}.{name}" for part, stored in enumerate(parts) for name in needed if (name, part) not in loaded]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        remedy = "choose a complete one"
        if all(name.endswith(".bias") for name in missing):
            remedy += ", or, where this architecture has no such bias, one in which these layers are not quantized"
        raise CheckpointError(f"the checkpoint has no {', '.join(missing[:3])}{more}; {remedy}")


def _stored(prefix: str, parts: int, fused: Mapping[str, list[str]]) -> tuple[str, ...]:
    """What the checkpoint calls the parts of a layer."""
    above, dot, last = prefix.rpartition(".")
    names = fused.get(last, [])
    if len(names) == parts:
        return tuple(f"{above}{dot}{name}" for name in names)
    return (prefix,) if parts == 1 else tuple(f"{prefix} (part {number})" for number in range(parts))


def _parts(call: BoundArguments, parts: int) -> Iterable[int]:
    """Which parts of a layer the call of a weight loader is for. A checkpoint may have them in one tensor."""
    shard = call.arguments.get("loaded_shard_id")
    shards = shard if isinstance(shard, tuple) else (shard,)
    # No part is named, or one by a name that is not known here: it may be for all of them.
    if any(one not in QKV if isinstance(one, str) else one is None for one in shards):
        return range(parts)
    return [QKV[one] if isinstance(one, str) else one for one in shards]
