"""Linear layers of a quantized checkpoint are packed one by one, as soon as all of a layer has been read.

vLLM takes memory for all layers in the checkpoint's form, fills it, and has them packed when the last is loaded.
Loading by layers, which vLLM has for weights that are quantized while they are loaded, keeps what comes for a layer
where it is, in the mapped file, until the layer is complete; memory in the checkpoint's form is taken for that layer
alone, and given back when it is packed.

Freeing is not enough: PyTorch's allocator in its builds for AArch64 (mimalloc) keeps what is freed, and asks for huge
pages, which are taken whole. Of 51 MiB of GPTQ weights it made 70 in that way, and left them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from vllm_backplane.device import host
from vllm_backplane.layers.deferred_weights import collect, insist_on_loaded
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization.online.linear import empty, install, into_huge_pages
from vllm_backplane.runtime import runtime


@contextmanager
def loaded_by_layer(layer: torch.nn.Module, parts: int, fused: Mapping[str, list[str]]) -> Iterator[None]:
    """Parameters created inside have no memory until the layer is complete. The method needs `uses_meta_device`, by
    which vLLM knows to finish layers of which the checkpoint does not have everything. `parts` and `fused` are those of
    `collect`."""
    with torch.device("meta"):
        yield
    collect(layer, str(getattr(layer, "prefix", "a layer")), parts, fused)


def exchange(
    layer: torch.nn.Module, needed: tuple[str, ...], pack: Callable[[], Packed], beside: tuple[str | None, ...] = ()
) -> None:
    """Put packed weights in the place of the parameters that they are made of, and of those `beside` them."""
    insist_on_loaded(layer, needed)
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
