"""Implements sleep mode: releases the memory of a card while the engine is idle, and restores it when the engine wakes.

vLLM's own implementation uses CUDA's virtual memory. Here the device has pools (`Device.sleep_pool`): weights are
loaded in one, the KV cache is allocated in another. Each pool can be released and restored as a whole, and its tensors
keep their addresses.

Level 1 keeps the weights, outside of the card's memory. Level 2 keeps only what no checkpoint has: the model's buffers,
and parameters that the user names (--sleep-preserve-parameter-names). After waking from level 2, the other weights are
loaded again (vLLM's `reload_weights`). Both levels lose the contents of the KV cache; vLLM resets its prefix cache too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)


class Sleeper:
    """Releases and restores the memory pools of one card. It is used only if the device has `Capabilities.sleep`."""

    def __init__(self, device: Device, card: int) -> None:
        self._device = device
        self._card = card
        self._asleep: set[str] = set()
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pool(self, tag: str) -> AbstractContextManager[None]:
        """Returns the context whose allocations can later be released under `tag`."""
        return self._device.sleep_pool(tag, self._card)

    def sleep(self, level: int, models: Iterable[torch.nn.Module], preserved: Iterable[torch.Tensor] = ()) -> None:
        """Releases the memory. `preserved` are the parameters that level 2 keeps. If a release fails, only the contents
        of the KV cache are lost."""
        if level not in (1, 2):
            raise BackplaneError(f"sleep level {level} does not exist; choose 1 (keeps the weights) or 2")
        if level == 2:
            kept = [*(buffer for model in models for buffer in model.buffers()), *preserved]
            self._saved = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in kept]
        self._release(KV_CACHE, keep=False)
        self._release(WEIGHTS, keep=level == 1)

    def discard(self, tags: Iterable[str]) -> None:
        """Releases the memory of these tags and loses its contents."""
        for tag in tags:
            self._release(_checked_tag(tag), keep=False)

    def wake(self, tags: Iterable[str] | None) -> None:
        """Restores the memory of these tags, or of all."""
        for tag in TAGS if tags is None else tuple(map(_checked_tag, tags)):
            if tag in self._asleep:
                self._device.restore(tag, self._card)
                self._asleep.remove(tag)
        if WEIGHTS not in self._asleep:
            with torch.no_grad():
                for tensor, saved in self._saved:
                    tensor.copy_(saved)
            self._saved = []
        self._device.synchronize()

    def _release(self, tag: str, keep: bool) -> None:
        if tag not in self._asleep:
            self._device.release(tag, keep, self._card)
            self._asleep.add(tag)


def preserved_parameters(
    patterns: Sequence[str], model: torch.nn.Module, draft: torch.nn.Module | None
) -> list[torch.nn.Parameter]:
    """Returns the parameters that match vLLM's --sleep-preserve-parameter-names.

    Patterns are globs. Parameters that only the draft model has are named with the prefix "draft.". A pattern without a
    match raises, except "draft.*".
    """
    parameters = dict(model.named_parameters())
    if draft is not None:
        shared = {id(parameter) for parameter in parameters.values()}
        own = {name: parameter for name, parameter in draft.named_parameters() if id(parameter) not in shared}
        parameters |= {f"draft.{name}": parameter for name, parameter in own.items()}
    names: dict[str, None] = {}
    for pattern in patterns:
        matches = fnmatch.filter(parameters, pattern)
        if not matches and pattern != "draft.*":
            raise BackplaneError(
                f"--sleep-preserve-parameter-names has {pattern!r}, which matches no parameter; there are "
                f"{', '.join(list(parameters)[:3])} and {max(len(parameters) - 3, 0)} more"
            )
        names.update(dict.fromkeys(matches))
    return [parameters[name] for name in names]


def require_known(tags: Iterable[str]) -> None:
    """Raises BackplaneError for a tag that sleep mode does not have."""
    for tag in tags:
        _checked_tag(tag)


def _checked_tag(tag: str) -> str:
    if tag not in TAGS:
        raise BackplaneError(f"sleep mode has no tag {tag!r}; choose among: {', '.join(TAGS)}")
    return tag
