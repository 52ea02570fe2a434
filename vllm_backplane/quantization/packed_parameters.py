"""Puts packed weights into a layer as parameters, and releases the memory of the tensors that they replace."""

from __future__ import annotations

import torch
from vllm.logger import init_logger

from vllm_backplane.host import host_memory
from vllm_backplane.layers.linear import refuse_loading
from vllm_backplane.ops.quantized_linear import Packed
from vllm_backplane.runtime import runtime

logger = init_logger("vllm." + __name__)


def install_packed(
    layer: torch.nn.Module, packed: Packed, name: str = "weight", device: torch.device | None = None
) -> None:
    """Sets codes, scales and offsets as parameters of a layer.

    The codes take the name of the weight, because vLLM reads a layer's device from `layer.weight` (for LoRA, for
    example).
    """
    for parameter_name, tensor in packed_tensors(packed, name).items():
        set_parameter(layer, parameter_name, tensor, device)


def packed_tensors(packed: Packed, name: str = "weight") -> dict[str, torch.Tensor | None]:
    """Returns the tensors of a packed weight by the names of their parameters."""
    return {name: packed.codes, f"{name}_scale": packed.scales, f"{name}_offset": packed.offsets}


def set_parameter(
    layer: torch.nn.Module, name: str, tensor: torch.Tensor | None, device: torch.device | None = None
) -> None:
    """Sets a parameter that refuses to be loaded into. Registers the name without a parameter if `tensor` is None."""
    if tensor is None:
        layer.register_parameter(name, None)
        return
    parameter = torch.nn.Parameter(tensor.to(device or tensor.device), requires_grad=False)
    parameter.weight_loader = refuse_loading  # type: ignore[attr-defined]
    setattr(layer, name, parameter)


def free_storage(tensor: torch.Tensor) -> None:
    """Frees the memory of a tensor that vLLM still refers to while its layer is loaded."""
    storage = tensor.data.untyped_storage()
    tensor.data = tensor.data.new_empty(0)
    if tensor.is_cpu:
        host_memory.drop_unused_storage(storage)


def release_freed_memory() -> None:
    """Returns freed memory to the system after a layer is packed.

    Freed memory between the packed weights would otherwise accumulate from layer to layer.
    """
    runtime().device.empty_cache()


def move_to_huge_pages(codes: torch.Tensor) -> None:
    """Moves codes to huge pages. They are allocated in small pages, so that they take no more memory than they need."""
    if codes.is_cpu and (reason := host_memory.collapse_to_huge_pages(codes.untyped_storage())):
        logger.info_once("Packed weights stay in small pages, which are slower to read (%s).", reason)
