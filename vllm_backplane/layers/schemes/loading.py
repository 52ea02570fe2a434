"""Linear layers of a quantized checkpoint are packed one by one, as soon as all of a layer has been read.

vLLM takes memory for all layers in the checkpoint's form, fills it, and has them packed when the last is loaded.
Loading by layers, which vLLM has for weights that are quantized while they are loaded, keeps what comes for a layer
where it is, in the mapped file, until the layer is complete; memory in the checkpoint's form is taken for that layer
alone, and given back when it is packed.

Freeing is not enough: PyTorch's allocator in its builds for AArch64 (mimalloc) keeps what is freed, and asks for huge
pages, which are taken whole. Of 51 MiB of GPTQ weights it made 70 in that way, and left them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing

from vllm_backplane.device import host
from vllm_backplane.errors import CheckpointError
from vllm_backplane.layers.quantization.linear import empty, install, into_huge_pages
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.runtime import runtime


@contextmanager
def loaded_by_layer(layer: torch.nn.Module) -> Iterator[None]:
    """Parameters created inside have no memory until the layer is complete. The method needs `uses_meta_device`, by
    which vLLM knows to finish layers of which the checkpoint does not have everything."""
    with torch.device("meta"):
        yield
    initialize_online_processing(layer)
    load_format = get_current_vllm_config().load_config.load_format
    layer.backplane_must_be_loaded = load_format != "dummy"


def exchange(layer: torch.nn.Module, loaded: tuple[str | None, ...], pack: Callable[[], Packed]) -> None:
    """Put packed weights in the place of the parameters that they are made of."""
    info = get_layerwise_info(layer)
    if getattr(layer, "backplane_must_be_loaded", False) and info.can_load() and info.load_numel == 0:
        # vLLM has given it memory of any content.
        name = getattr(layer, "prefix", "a layer")
        raise CheckpointError(f"the checkpoint has no weights for {name}; choose a complete one")
    with host.without_huge_pages():
        made = pack()
    for name in loaded:
        parameter = None if name is None else getattr(layer, name, None)
        if name is not None and parameter is not None:
            delattr(layer, name)
            empty(parameter)
    install(layer, made)
    into_huge_pages(made.codes)
    # Freed memory between codes that stay would add up from layer to layer.
    runtime().device.empty_cache()
