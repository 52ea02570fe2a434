"""Stand-ins for what vLLM asks of an accelerator and the host does not need.

Work on the CPU is done when the call returns, so there is nothing to wait for and no cache to empty. PyTorch raises
when `torch.accelerator` is asked without an accelerator, and vLLM asks on every out-of-tree platform, at shutdown for
instance; the calls that are trivially fulfilled are answered here instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_backplane.devices.cpu.host_memory import host_memory

_installed = False


def _wait_for_nothing(device: Any = None, /) -> None:
    """Work on the host is done when its call returns."""


def _empty_nothing() -> None:
    """The host's allocator keeps no cache that PyTorch could empty."""


def _empty_no_host_cache() -> None:
    """There is no pinned-memory cache."""


def _memory_info(device_index: Any = None, /) -> tuple[int, int]:
    now = host_memory()
    return now.free, now.total


def install() -> None:
    """Answer `torch.accelerator` calls in this process, once."""
    global _installed
    if _installed:
        return
    _installed = True
    # Distinct functions: Dynamo keys its handling of synchronize by the object.
    torch.accelerator.synchronize = _wait_for_nothing
    torch.accelerator.empty_cache = _empty_nothing
    torch.accelerator.empty_host_cache = _empty_no_host_cache
    torch.accelerator.get_memory_info = _memory_info


@contextmanager
def runner_types() -> Iterator[None]:
    """While vLLM's runner is constructed, events and streams are the host's."""
    event, stream = torch.Event, torch.cuda.Stream
    torch.Event, torch.cuda.Stream = torch.cpu.Event, torch.cpu.Stream  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch.Event, torch.cuda.Stream = event, stream  # type: ignore[misc]
