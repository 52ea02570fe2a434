"""What vLLM asks of PyTorch's accelerator, and of `torch.cuda` whatever the accelerator is.

vLLM asks on every out-of-tree platform: for an event when the runner is built, for a stream while it speculates or
copies results, for a synchronisation when the process ends. For streams and events it asks `torch.cuda` by name; its
second runner makes some in every step.

- A device that is PyTorch's accelerator has a module with the same surface, which answers for `torch.cuda`.
- A device that PyTorch does not count as an accelerator has done its work when the call returns, so there is nothing to
  wait for. PyTorch raises when `torch.accelerator` is asked and there is none, and refuses to make an event. Here the
  device answers for `torch.accelerator`, and PyTorch's own host streams, which do nothing, stand in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError


class HostEvent(torch.cpu.Event):
    """What it stands for has happened when it is recorded, so no argument makes a difference."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._recorded - self._recorded) * 1000


class HostStream(torch.cpu.Stream):
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Of which device, and how urgent, makes no difference either."""


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


def _answer_with_module(device: Device) -> None:
    module: Any = torch.get_device_module(device.torch_type)
    if module is torch.cuda:
        return
    for name in ("Stream", "Event", "current_stream", "stream"):
        try:
            setattr(torch.cuda, name, getattr(module, name))
        except AttributeError:
            raise BackplaneError(
                f"device {device.name!r} claims streams, and torch.{device.torch_type} has no {name!r}; add it to the "
                "device module"
            ) from None


def answer_for(device: Device, card: int) -> None:
    """Route PyTorch's accelerator calls to the device, for the rest of this process."""
    if not needed(device):
        if device.capabilities.streams:
            _answer_with_module(device)
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

    def set_stream(_stream: Any) -> None:
        """There is one."""

    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    torch.cuda.stream = torch.cpu.stream  # type: ignore[assignment]
    torch.cuda.set_stream = set_stream  # type: ignore[assignment]
    torch.cuda.Event, torch.cuda.Stream = HostEvent, HostStream  # type: ignore[misc,assignment]


@contextmanager
def host_events(device: Device) -> Iterator[None]:
    """While vLLM's runner is built, events are the host's."""
    if not needed(device):
        yield
        return
    event = torch.Event
    torch.Event = HostEvent  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.Event = event  # type: ignore[misc]
