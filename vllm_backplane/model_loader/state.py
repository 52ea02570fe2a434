"""All that loading leaves in a model: its tensors, and the numbers that layers keep beside them, by where they are.

A worker that gets its weights from another one after they were prepared for the device (packed, turned, split into
parts) needs every tensor that preparing made of them, and none but parameters are listed anywhere. So what layers hold
is walked through, with the objects of vLLM and of this package that hold something for them. Numbers are not sent but
compared: preparing may have read one off the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Numbers = dict[str, int | float | bool]

WALKED = ("vllm.model_executor.", "vllm.v1.attention.", "vllm.models.", "vllm_backplane.")
"""Modules of the classes whose objects are looked into. Not those of groups of processes and of configurations."""
LEFT_OUT = ("training", "kv_cache")
"""Of a module: says nothing about weights, or is not there yet."""


def state_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], Numbers]:
    tensors: dict[str, torch.Tensor] = {}
    numbers: Numbers = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, (bool, int, float)):
            numbers[path] = _plain(value)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.numel() and not value.is_meta:
                tensors[path] = value
            continue
        waiting.extend((f"{path}.{name}" if path else name, held) for name, held in _held(value))
    return dict(sorted(tensors.items())), dict(sorted(numbers.items()))


def _plain(value: int | float | bool) -> int | float | bool:
    """Of an enumeration the value, which is what another process is told."""
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, float) else int(value)


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        for group in (value._parameters, value._buffers, value._modules):
            yield from group.items()
        for name, held in vars(value).items():
            if name not in LEFT_OUT and name not in _OF_EVERY_MODULE:
                yield name, held
    elif isinstance(value, (list, tuple)):
        yield from ((str(place), held) for place, held in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), held) for key, held in value.items() if isinstance(key, (str, int)))
    elif type(value).__module__.startswith(WALKED) and not isinstance(value, type):
        yield from vars(value).items() if hasattr(value, "__dict__") else ()


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
