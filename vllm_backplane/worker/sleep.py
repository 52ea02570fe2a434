"""Sleep mode: a card's memory is given back while nobody asks, and taken again.

vLLM's own way is CUDA's virtual memory. Here the device has pools (`Device.sleep_pool`): weights are loaded in one, the
KV cache is allocated in another, and each can be released and restored as a whole, its tensors keeping their addresses.

Level 1 keeps the weights, outside of the card's memory. Level 2 keeps only what no checkpoint has, the model's buffers,
and parameters that the user names (--sleep-preserve-parameter-names); after waking, the other weights are loaded again
(vLLM's `reload_weights`). What is in the KV cache is lost at both: vLLM forgets it too.
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
    """What of one card sleeps. It is asked only where `Capabilities.sleep` is claimed."""

    def __init__(self, device: Device, card: int) -> None:
        self._device = device
        self._card = card
        self._asleep: set[str] = set()
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pool(self, tag: str) -> AbstractContextManager[None]:
        return self._device.sleep_pool(tag, self._card)

    def sleep(self, level: int, models: Iterable[torch.nn.Module], preserved: Iterable[torch.Tensor] = ()) -> None:
        """`preserved`: parameters whose contents level 2 keeps. Where it fails, nothing but the KV cache is lost."""
        if level not in (1, 2):
            raise BackplaneError(f"sleep level {level} does not exist; choose 1 (keeps the weights) or 2")
        if level == 2:
            kept = [*(buffer for model in models for buffer in model.buffers()), *preserved]
            self._saved = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in kept]
        self._release(KV_CACHE, keep=False)
        self._release(WEIGHTS, keep=level == 1)

    def discard(self, tags: Iterable[str]) -> None:
        for tag in tags:
            self._release(_known(tag), keep=False)

    def wake(self, tags: Iterable[str] | None) -> None:
        for tag in TAGS if tags is None else tuple(map(_known, tags)):
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
    """The parameters that match vLLM's --sleep-preserve-parameter-names: globs, with "draft." before the names of what
    the draft model has for itself. A pattern that names nothing is an error; "draft.*" may."""
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
                f"--sleep-preserve-parameter-names has {pattern!r}, which is no parameter's name; there are "
                f"{', '.join(list(parameters)[:3])} and {max(len(parameters) - 3, 0)} more"
            )
        names.update(dict.fromkeys(matches))
    return [parameters[name] for name in names]


def _known(tag: str) -> str:
    if tag not in TAGS:
        raise BackplaneError(f"nothing sleeps under the name {tag!r}; choose among: {', '.join(TAGS)}")
    return tag
