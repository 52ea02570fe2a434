"""Defers the loading of a layer until the checkpoint has supplied all of its tensors, and names those that are missing.

vLLM's layerwise loading buffers the tensors of a layer and processes the layer when it is complete. It gives
uninitialized memory to a tensor that never arrives. vLLM's own check of what was loaded (`track_weights_loading`)
skips such layers, because their parameters are replaced during loading. Each layer therefore checks its own tensors
before it packs or quantizes anything, shard by shard where several weights are fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import BoundArguments
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing

from vllm_backplane.errors import CheckpointError
from vllm_backplane.guards import guarded

QKV_SHARDS = {"q": 0, "k": 1, "v": 2}
"""Index of each shard of a fused QKV layer, by the name that vLLM's weight loaders give it."""


@guarded(
    "vllm.model_executor.model_loader.reload.layerwise:initialize_online_processing",
    "vllm.model_executor.model_loader.reload.layerwise:make_online_process_loader",
    "vllm.model_executor.model_loader.reload.layerwise:_layerwise_process",
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing",
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
    why="the order of loading is relied on, and what was loaded is read from its records",
)
def defer_loading(layer: torch.nn.Module, prefix: str, shards: int, packed_modules: Mapping[str, list[str]]) -> None:
    """Starts vLLM's layerwise loading for a layer.

    `shards` is the number of weights that the layer fuses. `packed_modules` is vLLM's packed_modules_mapping: the names
    of a fused layer's shards in the checkpoint, by the last part of the layer's own name.
    """
    initialize_online_processing(layer)
    layer.backplane_must_be_loaded = get_current_vllm_config().load_config.load_format != "dummy"
    layer.backplane_shard_names = _shard_names(prefix, shards, packed_modules)  # type: ignore[assignment]


def defer_bias_loading(layer: torch.nn.Module) -> None:
    """Adds the bias of a deferred layer to its layerwise loading.

    vLLM creates a bias after all other parameters of a layer. It would not buffer a bias that the checkpoint supplies
    before any other tensor of the layer.
    """
    if hasattr(layer, "backplane_shard_names") and getattr(layer, "bias", None) is not None:
        initialize_online_processing(layer)
        layer.backplane_defers_bias = True  # type: ignore[assignment]


def require_loaded(layer: Any, needed: tuple[str, ...]) -> None:
    """Raises CheckpointError unless all shards of the parameters `needed`, and of a deferred bias, were loaded."""
    info = get_layerwise_info(layer)
    if not getattr(layer, "backplane_must_be_loaded", False) or not info.can_load():
        return
    shards: tuple[str, ...] = layer.backplane_shard_names
    if info.load_numel == 0:
        name = shards[0] if len(shards) == 1 else f"{', '.join(shards[:-1])} and {shards[-1]}"
        raise CheckpointError(f"the checkpoint has no weights for {name}; choose a complete one")
    if getattr(layer, "backplane_defers_bias", False):
        needed += ("bias",)
    loaded = {(name, shard) for name, call in info.loaded_weights for shard in _loaded_shards(call, len(shards))}
    missing = [
        f"{shard_name}.{name}"
        for shard, shard_name in enumerate(shards)
        for name in needed
        if (name, shard) not in loaded
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        remedy = "choose a complete one"
        if all(name.endswith(".bias") for name in missing):
            remedy += ", or, if this architecture has no such bias, one in which these layers are not quantized"
        raise CheckpointError(f"the checkpoint has no {', '.join(missing[:3])}{more}; {remedy}")


def _shard_names(prefix: str, shards: int, packed_modules: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Returns the names of a layer's shards in the checkpoint."""
    parent, dot, last = prefix.rpartition(".")
    names = packed_modules.get(last, [])
    if len(names) == shards:
        return tuple(f"{parent}{dot}{name}" for name in names)
    return (prefix,) if shards == 1 else tuple(f"{prefix} (part {number})" for number in range(shards))


def _loaded_shards(call: BoundArguments, shards: int) -> Iterable[int]:
    """Returns the shards that one call of a weight loader loads; one tensor may hold several of them."""
    shard = call.arguments.get("loaded_shard_id")
    ids = shard if isinstance(shard, tuple) else (shard,)
    # A call without a shard id, or with a name that is not one of QKV's, may load all of them.
    if any(one not in QKV_SHARDS if isinstance(one, str) else one is None for one in ids):
        return range(shards)
    return [QKV_SHARDS[one] if isinstance(one, str) else one for one in ids]
