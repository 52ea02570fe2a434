"""All that loading leaves in a model: its tensors, and the numbers that layers keep beside them, by where they are.

A worker that gets its weights from another one after they were prepared for the device (packed, turned, split into
parts) needs every tensor that preparing made of them, and none but parameters are listed anywhere. So what layers hold
is walked through, with the objects of vLLM and of this package that hold something for them. Numbers are not sent but
compared: preparing may have read one off the weights. Those of configurations were there before any weight, and
differ with options that do not touch weights, such as the length of a batch: they are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Numbers = dict[str, int | float | bool]

WALKED = ("vllm.model_executor.", "vllm.v1.attention.", "vllm.models.", "vllm_backplane.")
"""Modules of the classes whose objects are looked into. Not those of groups of processes and of configurations."""
LEFT_OUT = (
    "training",
    "kv_cache",  # is not there yet
    # What a head that drafts wants to read. vLLM sets it when loading is over, so a server that offers weights may have
    # it, and one that compares does not.
    "aux_hidden_state_layers",
    # Copies of options: of those about batches, and of what latent attention makes of them.
    "max_num_batched_tokens",
    "_chunked_prefill_workspace_size",
)
"""Of what is looked into, by its name: says nothing about weights."""


def state_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], Numbers]:
    tensors: dict[str, torch.Tensor] = {}
    numbers: Numbers = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any, bool]] = [("", model, False)]
    while waiting:
        path, value, configured = waiting.pop()
        if isinstance(value, (bool, int, float)):
            if not configured:
                numbers[path] = _plain(value)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.numel() and not value.is_meta:
                tensors[path] = value
            continue
        configured = configured or _is_configuration(value)
        waiting.extend((f"{path}.{name}" if path else name, held, configured) for name, held in _held(value))
    return dict(sorted(tensors.items())), dict(sorted(numbers.items()))


def _plain(value: int | float | bool) -> int | float | bool:
    """Of an enumeration the value, which is what another process is told."""
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, float) else int(value)


def _is_configuration(value: Any) -> bool:
    """By the name of its class, which is all that vLLM's have in common. Some hold tensors (FusedMoEQuantConfig)."""
    return type(value).__name__.endswith("Config")


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
        held = vars(value) if hasattr(value, "__dict__") else {}
        yield from ((name, one) for name, one in held.items() if name not in LEFT_OUT)


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
