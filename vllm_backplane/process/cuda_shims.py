"""Replaces the `torch.cuda` and `torch.accelerator` calls that vLLM makes on every platform.

vLLM makes these calls on out-of-tree platforms too: it creates an event when the runner is built, uses a stream for
speculative decoding and for copies of results, and synchronizes when the process ends. It takes streams and events from
`torch.cuda` by name; its V2 model runner creates some in every step.

- A device that is PyTorch's accelerator has a device module with the same interface. Its streams and events replace
  those of `torch.cuda`.
- A device that is not PyTorch's accelerator has finished its work when a call returns, so there is nothing to wait for.
  Without an accelerator PyTorch raises in `torch.accelerator` and when an event is created. Here the device implements
  the calls of `torch.accelerator`, and PyTorch's host streams, which do nothing, replace the streams.
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
    """Implements an event for a device without streams: the work is done when the event is recorded.

    Arguments are ignored.
    """

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._recorded - self._recorded) * 1000


class HostStream(torch.cpu.Stream):
    """Implements a stream for a device without streams. Its device and priority are ignored."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


def _needs_stand_ins(device: Device) -> bool:
    """Returns whether the device is not PyTorch's accelerator. Raises if such a device claims streams."""
    current = torch.accelerator.current_accelerator()
    is_accelerator = current is not None and current.type == device.torch_type
    if device.capabilities.streams and not is_accelerator:
        raise BackplaneError(
            f"device {device.name!r} claims streams, but PyTorch's accelerator is {current}, not "
            f"{device.torch_type!r}; register the device module and its accelerator hooks in Device.load()"
        )
    return not is_accelerator


def _use_device_module(device: Device) -> None:
    """Replaces the streams and events of `torch.cuda` with those of the device's own torch module."""
    module: Any = torch.get_device_module(device.torch_type)
    if module is torch.cuda:
        return
    for name in ("Stream", "Event", "current_stream", "stream"):
        try:
            setattr(torch.cuda, name, getattr(module, name))
        except AttributeError:
            raise BackplaneError(
                f"device {device.name!r} claims streams, but torch.{device.torch_type} has no {name!r}; add it to the "
                "device module"
            ) from None


def install_shims(device: Device, card: int) -> None:
    """Routes PyTorch's accelerator calls to the device, for the rest of this process."""
    if not _needs_stand_ins(device):
        if device.capabilities.streams:
            _use_device_module(device)
        return

    # Distinct functions: Dynamo keys its handling of synchronize by the object.
    def synchronize(_device: Any = None, /) -> None:
        device.synchronize()

    def empty_cache() -> None:
        device.empty_cache()

    def empty_host_cache() -> None:
        """Does nothing: the device has no pinned memory, so there is no cache of it."""

    def get_memory_info(_device: Any = None, /) -> tuple[int, int]:
        now = device.memory(card)
        return now.free, now.total

    torch.accelerator.synchronize = synchronize
    torch.accelerator.empty_cache = empty_cache
    torch.accelerator.empty_host_cache = empty_host_cache
    torch.accelerator.get_memory_info = get_memory_info

    def set_stream(_stream: Any) -> None:
        """Does nothing: there is only one stream."""

    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    torch.cuda.stream = torch.cpu.stream  # type: ignore[assignment]
    torch.cuda.set_stream = set_stream  # type: ignore[assignment]
    torch.cuda.Event, torch.cuda.Stream = HostEvent, HostStream  # type: ignore[misc,assignment]


@contextmanager
def host_events(device: Device) -> Iterator[None]:
    """Makes `torch.Event` create host events inside the block, in which vLLM's runner is built."""
    if not _needs_stand_ins(device):
        yield
        return
    event = torch.Event
    torch.Event = HostEvent  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.Event = event  # type: ignore[misc]
