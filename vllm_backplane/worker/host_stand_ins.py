"""What vLLM asks of PyTorch's accelerator, answered for devices that PyTorch does not count as one.

On such a device work is done when the call returns, so there is nothing to wait for. PyTorch raises when
`torch.accelerator` is asked and there is none, refuses to make an event, and has streams for CUDA only; vLLM asks on
every out-of-tree platform: for an event when the runner is built, for a stream while it speculates, for a
synchronisation when the process ends. Here the device answers for `torch.accelerator`, and PyTorch's own host streams,
which do nothing, stand in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError


def needed(device: Device) -> bool:
    """Whether PyTorch has no answers of its own for this device."""
    current = torch.accelerator.current_accelerator()
    known = current is not None and current.type == device.torch_type
    if device.capabilities.streams and not known:
        raise BackplaneError(
            f"device {device.name!r} claims streams, and PyTorch's accelerator is {current}, not "
            f"{device.torch_type!r}; register the device module and its accelerator hooks in Device.load()"
        )
    return not known


def answer_for(device: Device, card: int) -> None:
    """Route PyTorch's accelerator calls to the device, for the rest of this process."""
    if not needed(device):
        return

    # Distinct functions: Dynamo keys its handling of synchronize by the object.
    def synchronize(_device: Any = None, /) -> None:
        device.synchronize()

    def empty_cache() -> None:
        device.empty_cache()

    def empty_host_cache() -> None:
        """No pinned memory, so no cache of it."""

    def get_memory_info(_device: Any = None, /) -> tuple[int, int]:
        now = device.memory(card)
        return now.free, now.total

    torch.accelerator.synchronize = synchronize
    torch.accelerator.empty_cache = empty_cache
    torch.accelerator.empty_host_cache = empty_host_cache
    torch.accelerator.get_memory_info = get_memory_info
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    torch.cuda.stream = torch.cpu.stream  # type: ignore[assignment]


@contextmanager
def host_events(device: Device) -> Iterator[None]:
    """While vLLM's runner is built, events and streams are PyTorch's own for the host."""
    if not needed(device):
        yield
        return
    event, stream = torch.Event, torch.cuda.Stream
    torch.Event, torch.cuda.Stream = torch.cpu.Event, torch.cpu.Stream  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.Event, torch.cuda.Stream = event, stream  # type: ignore[misc]
