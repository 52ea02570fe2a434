"""What vLLM asks of `torch.accelerator`, answered for devices that PyTorch does not count as accelerators.

On a device without streams work is done when the call returns, so there is nothing to wait for. PyTorch raises when
`torch.accelerator` is asked and there is none, and refuses to make an event; vLLM asks on every out-of-tree platform:
for an event when the runner is built, for a synchronisation when the worker ends. The device answers here instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_backplane.device import Device


def answer_for(device: Device, card: int) -> None:
    """Route `torch.accelerator` to the device in this process, unless PyTorch has its own answers for it."""
    if device.capabilities.streams:
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


@contextmanager
def host_events(device: Device) -> Iterator[None]:
    """While vLLM's runner is built, events and streams are PyTorch's own for the host, which do nothing."""
    if device.capabilities.streams:
        yield
        return
    event, stream = torch.Event, torch.cuda.Stream
    torch.Event, torch.cuda.Stream = torch.cpu.Event, torch.cpu.Stream  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.Event, torch.cuda.Stream = event, stream  # type: ignore[misc]
