"""Implements sleep mode on the simulated NPU: the driver suspends a memory pool whose contents are kept on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint64

import torch

from vllm_backplane.devices.sim.library import BlockInfo, driver, runtime

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 0, 1


class Pool:
    """Collects allocations of one card, and releases and restores them together."""

    def __init__(self, card: int) -> None:
        runtime("start")
        handle = c_uint64()
        driver("pool_create", card, byref(handle))
        self._card = card
        self._handle = handle.value
        self._kept: list[tuple[int, torch.Tensor]] = []
        self._incomplete = False
        """Whether the pool was resumed but a copy back failed, so that `_kept` is not restored completely."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Allocates this thread's tensors from the pool inside the context."""
        before = runtime("current_pool")
        runtime("set_pool", self._handle)
        try:
            yield
        finally:
            runtime("set_pool", before)

    def release(self, keep: bool) -> None:
        """Releases the pool's memory; with `keep`, its contents are copied to the host first."""
        driver("card_synchronize", self._card)
        if keep and self._incomplete:
            self.restore()
        kept = [self._saved(block) for block in self._blocks()] if keep else []
        driver("pool_suspend", self._handle)
        self._kept, self._incomplete = kept, False

    def restore(self) -> None:
        """Allocates the memory again and copies the kept contents back. It may be called again after it has failed."""
        if not self._incomplete:
            driver("pool_resume", self._handle)
        self._incomplete = True
        for base, contents in self._kept:
            driver("copy", self._stream(), _HOST_TO_DEVICE, base, contents.data_ptr(), contents.nbytes)
        self._kept, self._incomplete = [], False

    def _saved(self, block: BlockInfo) -> tuple[int, torch.Tensor]:
        contents = torch.empty(block.bytes, dtype=torch.uint8)
        driver("copy", self._stream(), _DEVICE_TO_HOST, contents.data_ptr(), block.base, block.bytes)
        return int(block.base), contents

    def _blocks(self) -> list[BlockInfo]:
        count = c_uint64()
        driver("blocks", self._card, self._handle, None, 0, byref(count))
        blocks = (BlockInfo * count.value)()
        driver("blocks", self._card, self._handle, blocks, count.value, byref(count))
        return list(blocks)

    def _stream(self) -> int:
        stream = c_uint64()
        driver("default_stream", self._card, byref(stream))
        return stream.value
