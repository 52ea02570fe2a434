"""Sleep mode: a card's memory is given back while nobody asks, and taken again.

vLLM's own way is CUDA's virtual memory. Here the device has pools (`Device.sleep_pool`): weights are loaded in one, the
KV cache is allocated in another, and each can be released and restored as a whole, its tensors keeping their addresses.

Level 1 keeps the weights on the host. Level 2 keeps only what no checkpoint has, the model's buffers; after waking, the
weights are loaded again (vLLM's `reload_weights`). What is in the KV cache is lost at both: vLLM forgets it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)


class Sleeper:
    """What of one card sleeps. It is asked only where `Capabilities.sleep` is claimed."""

    def __init__(self, device: Device, card: int) -> None:
        self._device = device
        self._card = card
        self._asleep: set[str] = set()
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pool(self, tag: str) -> AbstractContextManager[None]:
        return self._device.sleep_pool(tag, self._card)

    def sleep(self, level: int, models: Iterable[torch.nn.Module]) -> None:
        if level not in (1, 2):
            raise BackplaneError(f"sleep level {level} does not exist; choose 1 (keeps the weights on the host) or 2")
        if level == 2:
            self._buffers = [(buffer, buffer.cpu()) for model in models for buffer in model.buffers()]
        self._release(WEIGHTS, keep=level == 1)
        self._release(KV_CACHE, keep=False)

    def discard(self, tags: Iterable[str]) -> None:
        for tag in tags:
            self._release(_known(tag), keep=False)

    def wake(self, tags: Iterable[str] | None) -> None:
        for tag in TAGS if tags is None else tuple(map(_known, tags)):
            if tag in self._asleep:
                self._device.restore(tag, self._card)
                self._asleep.remove(tag)
        if WEIGHTS not in self._asleep:
            for buffer, saved in self._buffers:
                buffer.copy_(saved)
            self._buffers = []
        self._device.synchronize()

    def _release(self, tag: str, keep: bool) -> None:
        if tag not in self._asleep:
            self._device.release(tag, keep, self._card)
            self._asleep.add(tag)


def _known(tag: str) -> str:
    if tag not in TAGS:
        raise BackplaneError(f"nothing sleeps under the name {tag!r}; choose among: {', '.join(TAGS)}")
    return tag
