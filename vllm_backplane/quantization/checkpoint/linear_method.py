"""Loads and packs the linear layers of a quantized checkpoint one at a time.

vLLM allocates memory for all layers in the checkpoint's layout, fills it, and packs the layers after the last one is
loaded. vLLM's layerwise loading, made for online quantization, instead leaves the tensors of a layer in the mapped file
until the layer is complete. Memory in the checkpoint's layout is then allocated for that layer alone, and freed when
the layer is packed.

Freeing alone is not enough. PyTorch's allocator in its AArch64 builds (mimalloc) keeps freed memory and requests huge
pages, which the system allocates whole. With it, 51 MiB of GPTQ weights took 70 MiB and did not shrink again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.host import host_memory
from vllm_backplane.layers.layerwise_loading import defer_loading, require_loaded
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.quantization.base import LinearQuantizationMethod, LinearWeights
from vllm_backplane.quantization.checkpoint.registration import names_config_faults
from vllm_backplane.quantization.packed_parameters import (
    free_storage,
    install_packed,
    move_to_huge_pages,
    release_freed_memory,
)


class CheckpointLinearMethod(LinearQuantizationMethod):
    """Adds layerwise loading to vLLM's linear method of a checkpoint format. It precedes vLLM's class in the bases."""

    uses_meta_device = True  # so that vLLM also finishes layers for which the checkpoint lacks tensors
    quant_config: Any
    any_integers: ClassVar[tuple[str, ...]] = ()
    """Parameters for which checkpoints have int32 or int64, and both are right."""

    @names_config_faults
    def create_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        self.check_weights(weights)
        with torch.device("meta"):
            # The scales are float32, so that they keep the checkpoint's values for every --dtype.
            super(LinearQuantizationMethod, self).create_weights(
                layer,
                weights.input_size_per_partition,
                weights.output_partition_sizes,
                weights.input_size,
                weights.output_size,
                torch.float32,
                **weights.extra_attributes,
            )
        self.extend_parameters(layer, weights)
        prefix, shards = str(getattr(layer, "prefix", "a layer")), len(weights.output_partition_sizes)
        for name, parameter in layer.named_parameters(recurse=False):
            allowed = (torch.int32, torch.int64) if name in self.any_integers else (parameter.dtype,)
            loader = _naming(parameter.weight_loader, f"{prefix}.{name}", allowed)  # type: ignore[attr-defined]
            parameter.weight_loader = loader  # type: ignore[attr-defined]
        defer_loading(layer, prefix, shards, self.quant_config.packed_modules_mapping)

    def check_weights(self, weights: LinearWeights) -> None:
        """Raises BackplaneError if the layer cannot be divided among ranks."""

    def extend_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        """Changes or adds to the parameters that vLLM's method has created."""


def _naming(loader: Callable[..., Any], name: str, allowed: tuple[torch.dtype, ...]) -> Callable[..., Any]:
    """Returns a weight loader that names the tensor if it does not fit the layer. vLLM's loaders only assert its shape,
    and convert any type. A tensor must be of an `allowed` type; one floating type may stand for another."""

    @wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if len(tensors) > 1:
            _require_type(tensors[1].dtype, name, allowed)
        try:
            return loader(*args, **kwargs)
        except (AssertionError, IndexError, RuntimeError, ValueError) as fault:
            is_ours_or_memory = isinstance(fault, BackplaneError) or "allocate memory" in str(fault)
            if is_ours_or_memory or len(tensors) < 2 or tensors[0].shape == tensors[1].shape:
                raise
            param, loaded = tensors[:2]
            raise CheckpointError(
                f"the checkpoint's {name} has the shape {list(loaded.shape)}, which does not fit a parameter of "
                f"{list(param.shape)} ({type(fault).__name__}: {fault}); download the checkpoint again"
            ) from fault

    return load


def _require_type(found: torch.dtype, name: str, allowed: tuple[torch.dtype, ...]) -> None:
    if found in allowed or (found.is_floating_point and allowed[0].is_floating_point):
        return
    required = "a floating type" if allowed[0].is_floating_point else " or ".join(map(str, allowed))
    raise CheckpointError(
        f"the checkpoint's {name} has the type {found}, and {required} is required; download the checkpoint again"
    )


def replace_with_packed(
    layer: torch.nn.Module, needed: tuple[str, ...], pack: Callable[[], Packed], unused: tuple[str | None, ...] = ()
) -> None:
    """Replaces the parameters `needed`, from which `pack` makes the packed weights, and removes those `unused`."""
    require_loaded(layer, needed)
    with host_memory.without_huge_pages():
        packed = pack()
    for name in (*needed, *unused):
        parameter = None if name is None else getattr(layer, name, None)
        if name is not None and parameter is not None:
            delattr(layer, name)
            free_storage(parameter)
    install_packed(layer, packed)
    move_to_huge_pages(packed.codes)
    release_freed_memory()
