"""Linear layers of a quantized checkpoint are packed one by one, as soon as all of a layer has been read.

vLLM takes memory for all layers in the checkpoint's form, fills it, and has them packed when the last is loaded.
Loading by layers, which vLLM has for weights that are quantized while they are loaded, keeps what comes for a layer
where it is, in the mapped file, until the layer is complete; memory in the checkpoint's form is taken for that layer
alone, and given back when it is packed.

Freeing is not enough: PyTorch's allocator in its builds for AArch64 (mimalloc) keeps what is freed, and asks for huge
pages, which are taken whole. Of 51 MiB of GPTQ weights it made 70 in that way, and left them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import BoundArguments
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from vllm_backplane.device import host
from vllm_backplane.errors import CheckpointError
from vllm_backplane.layers.quantization.linear import empty, install, into_huge_pages
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.runtime import runtime

QKV = {"q": 0, "k": 1, "v": 2}
"""Parts of a fused layer by the names that vLLM has for them."""


@contextmanager
def loaded_by_layer(layer: torch.nn.Module, parts: int, fused: Mapping[str, list[str]]) -> Iterator[None]:
    """Parameters created inside have no memory until the layer is complete. The method needs `uses_meta_device`, by
    which vLLM knows to finish layers of which the checkpoint does not have everything. `fused` names the `parts` of a
    layer in the checkpoint, by the last part of the layer's own name."""
    with torch.device("meta"):
        yield
    initialize_online_processing(layer)
    load_format = get_current_vllm_config().load_config.load_format
    layer.backplane_must_be_loaded = load_format != "dummy"
    layer.backplane_stored = _stored(str(getattr(layer, "prefix", "a layer")), parts, fused)  # type: ignore[assignment]


def _stored(prefix: str, parts: int, fused: Mapping[str, list[str]]) -> tuple[str, ...]:
    """What the checkpoint calls the parts of a layer."""
    above, dot, last = prefix.rpartition(".")
    names = fused.get(last, [])
    if len(names) == parts:
        return tuple(f"{above}{dot}{name}" for name in names)
    return (prefix,) if parts == 1 else tuple(f"{prefix} (part {number})" for number in range(parts))


def exchange(
    layer: torch.nn.Module, needed: tuple[str, ...], pack: Callable[[], Packed], beside: tuple[str | None, ...] = ()
) -> None:
    """Put packed weights in the place of the parameters that they are made of, and of those `beside` them."""
    info = get_layerwise_info(layer)
    if getattr(layer, "backplane_must_be_loaded", False) and info.can_load():
        _insist_on_loaded(layer, info, needed)
    with host.without_huge_pages():
        made = pack()
    for name in (*needed, *beside):
        parameter = None if name is None else getattr(layer, name, None)
        if name is not None and parameter is not None:
            delattr(layer, name)
            empty(parameter)
    install(layer, made)
    into_huge_pages(made.codes)
    # Freed memory between codes that stay would add up from layer to layer.
    runtime().device.empty_cache()


def _insist_on_loaded(layer: Any, info: LayerReloadingInfo, needed: tuple[str, ...]) -> None:
    """vLLM gives a tensor that is not in the checkpoint memory of any content."""
    parts: tuple[str, ...] = layer.backplane_stored
    if info.load_numel == 0:
        name = getattr(layer, "prefix", "a layer")
        raise CheckpointError(f"the checkpoint has no weights for {name}; choose a complete one")
    loaded = {(name, part) for name, call in info.loaded_weights for part in _parts(call, len(parts))}
    missing = [f"{stored}.{name}" for part, stored in enumerate(parts) for name in needed if (name, part) not in loaded]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"the checkpoint has no {', '.join(missing[:3])}{more}; choose a complete one")


def _parts(call: BoundArguments, parts: int) -> Iterable[int]:
    """Which parts of a layer the call of a weight loader is for. A checkpoint may have them in one tensor."""
    shard = call.arguments.get("loaded_shard_id")
    shards = shard if isinstance(shard, tuple) else (shard,)
    # No part is named, or one by a name that is not known here: it may be for all of them.
    if any(one not in QKV if isinstance(one, str) else one is None for one in shards):
        return range(parts)
    return [QKV[one] if isinstance(one, str) else one for one in shards]
