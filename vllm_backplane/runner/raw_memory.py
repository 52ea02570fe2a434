"""Copies host memory between raw addresses, in place of vLLM's kernel that moves the states of recurrent layers.

vLLM launches that kernel for prefix caching of recurrent models alone, which Backplane refuses (`config/stages.py`), so
no server calls this module. It exists because the kernel is in the list of those that vLLM's runner can launch, and all
of them are replaced (`triton_replacements.py`): a launch copies or names the remedy, instead of failing inside Triton.

The kernel takes lists of addresses instead of tensors, so it cannot be an operator: a schema cannot express which
tensors are written, and a reference cannot turn an address on an arbitrary device into memory. Addresses of the host
are copied by memmove. A device with its own memory has to replace the kernel itself.
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
