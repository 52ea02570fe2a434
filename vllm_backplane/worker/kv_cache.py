"""Lets the device provide the memory of the KV cache.

vLLM allocates it with one `torch.zeros` inside a context that the worker chooses. The context here is PyTorch's own
means of answering such a call, scoped to that allocation; nothing is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError


class KvCacheStorage(TorchFunctionMode):
    def __init__(
        self,
        device: Device,
        card: int,
        refuse: Callable[[int], None],
        pool: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`refuse` is asked before an allocation, and raises where there is not so much memory. `pool` is around it."""
        super().__init__()
        self._pool = pool
        self._device = device
        self._card = card
        self._refuse = refuse
        self.bytes = 0

    def insist_on_use(self) -> None:
        """vLLM has allocated a KV cache: it must have come from here."""
        if not self.bytes:
            raise BackplaneError(
                "vLLM allocated the KV cache in a way that Backplane does not know, so it is not the device's memory; "
                "install a vLLM this version of vllm-backplane supports ('vllm-backplane doctor' names them)"
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1 and isinstance(args[0], int):
            self._refuse(self.bytes + args[0])
            self.bytes += args[0]
            with self._pool():
                return self._device.zeroed_bytes(args[0], self._card)
        return func(*args, **kwargs)
