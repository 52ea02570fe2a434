"""Copies host memory between raw addresses, for vLLM's kernel that moves the states of recurrent layers.

vLLM moves these states between cache blocks with a kernel that takes lists of addresses instead of tensors.
It cannot be an operator: a schema cannot express which tensors are written, and a reference cannot turn an
address on an arbitrary device into memory. If the addresses are the host's own, the copy is a memmove, which
is implemented here. A device with its own memory that supports prefix caching for such models replaces vLLM's
kernel itself, with one that can access its addresses.
"""

from __future__ import annotations

import ctypes

import torch

from vllm_backplane.errors import OperatorError


def copy_host_memory(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copies sizes[i] bytes from address sources[i] to targets[i], in order; the two ranges may overlap.

    The addresses must be in host tensors, which shows that they are host addresses.
    """
    for addresses in (sources, targets, sizes):
        if addresses.device.type != "cpu":
            raise OperatorError(
                f"memory at raw addresses of device {addresses.device.type!r} cannot be copied by the host; "
                "for models with recurrent layers start with --no-enable-prefix-caching, or let the device "
                "register a kernel for vllm.v1.worker.mamba_utils.batch_memcpy_kernel"
            )
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
