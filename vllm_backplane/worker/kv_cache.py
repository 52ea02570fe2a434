"""Lets the device allocate the memory of the KV cache.

vLLM allocates the KV cache with `torch.zeros` calls inside a context that the worker chooses. That context is a
`TorchFunctionMode` here, PyTorch's own means to intercept such a call, and is active for this allocation only. Nothing
is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError
from vllm_backplane.guards import guarded


@guarded("vllm.v1.worker.utils:allocate_kv_cache", why="its call of torch.zeros is intercepted")
class KvCacheAllocator(TorchFunctionMode):
    """Allocates vLLM's KV cache tensors through `Device.zeroed_bytes` inside a `with` block, and counts their bytes."""

    def __init__(
        self,
        device: Device,
        card: int,
        check_size: Callable[[int], None],
        pool: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`check_size` receives the total size before each allocation, and raises if there is not enough memory. `pool`
        returns the context of each allocation."""
        super().__init__()
        self._pool = pool
        self._device = device
        self._card = card
        self._check_size = check_size
        self.bytes = 0

    def require_use(self) -> None:
        """Raises if vLLM has allocated its KV cache in another way."""
        if not self.bytes:
            raise BackplaneError(
                "vLLM allocated the KV cache in a way that Backplane does not support, so it is not in the device's "
                "memory; install a vLLM that this vllm-backplane supports ('vllm-backplane doctor' lists them)"
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1 and isinstance(args[0], int):
            self._check_size(self.bytes + args[0])
            self.bytes += args[0]
            with self._pool():
                return self._device.zeroed_bytes(args[0], self._card)
        return func(*args, **kwargs)
