"""Collects everything that loading leaves in a model, by attribute path: its tensors, and the scalars of its layers.

A worker that receives weights from another worker gets them as they are after `process_weights_after_loading` (packed,
transposed, split into parts). It needs every tensor which that step has made, and PyTorch lists only parameters and
buffers. So the attributes of all layers are traversed, and the objects of vLLM and of this package in them. Scalars are
compared rather than sent, because the step may have read one off the weights. Scalars of configurations exist before
any weight is loaded and depend on options that do not affect weights, such as the batch size: they are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Scalars = dict[str, int | float | bool]

TRAVERSED = ("vllm.model_executor.", "vllm.v1.attention.", "vllm.models.", "vllm_backplane.")
"""Module prefixes of the classes whose attributes are traversed. Process groups and configurations are not among
them."""
SKIPPED = (
    "training",
    "kv_cache",  # does not exist yet
    # Layers whose hidden states a draft head reads. vLLM sets it after loading, so a running server may have it while
    # the new server, which compares during loading, does not.
    "aux_hidden_state_layers",
    # Copies of options: of the batch size, and of what latent attention derives from it.
    "max_num_batched_tokens",
    "_chunked_prefill_workspace_size",
)
"""Names of attributes that do not depend on the weights."""


def model_tensors(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], Scalars]:
    """Returns the tensors and the scalars of a loaded model, each sorted by path."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: Scalars = {}
    seen: set[int] = set()
    pending: list[tuple[str, Any, bool]] = [("", model, False)]
    while pending:
        path, value, in_configuration = pending.pop()
        if isinstance(value, (bool, int, float)):
            if not in_configuration:
                scalars[path] = _plain(value)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.numel() and not value.is_meta:
                tensors[path] = value
            continue
        in_configuration = in_configuration or _is_configuration(value)
        pending.extend(
            (f"{path}.{name}" if path else name, child, in_configuration) for name, child in _children(value)
        )
    return dict(sorted(tensors.items())), dict(sorted(scalars.items()))


def _plain(value: int | float | bool) -> int | float | bool:
    """Returns the plain Python number, also of an enumeration member: JSON has no enumerations."""
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, float) else int(value)


def _is_configuration(value: Any) -> bool:
    """Returns whether the name of the class ends in "Config", which is all that vLLM's configurations have in common.
    Some of them hold tensors (FusedMoEQuantConfig)."""
    return type(value).__name__.endswith("Config")


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        for group in (value._parameters, value._buffers, value._modules):
            yield from group.items()
        for name, child in vars(value).items():
            if name not in SKIPPED and name not in _OF_EVERY_MODULE:
                yield name, child
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), child) for index, child in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), child) for key, child in value.items() if isinstance(key, (str, int)))
    elif type(value).__module__.startswith(TRAVERSED) and not isinstance(value, type):
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        yield from ((name, child) for name, child in attributes.items() if name not in SKIPPED)


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
