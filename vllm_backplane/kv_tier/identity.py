"""What two workers must have in common for one to use the other's blocks: every weight, the model's configuration, how
the KV cache is laid out, and the worker's part of the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vllm_backplane.kv_tier.wire import IDENTITY_BYTES

_PIECE = 1 << 24


def identity(model: torch.nn.Module, description: dict[str, Any]) -> bytes:
    """Of all bytes, not of samples: models that differ in a few rows must not share."""
    whole = hashlib.blake2b(json.dumps(description, sort_keys=True, default=str).encode(), digest_size=IDENTITY_BYTES)
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda named: named[0])
    with ThreadPoolExecutor(4) as pool:  # hashing lets go of Python's lock
        for digest in pool.map(lambda named: digest_of(*named), tensors):
            whole.update(digest)
    return whole.digest()


def plain(configuration: Any) -> Any:
    """A model's configuration without where it was read from."""
    if isinstance(configuration, dict):
        return {key: plain(value) for key, value in configuration.items() if key != "_name_or_path"}
    return configuration


def digest_of(name: str, tensor: torch.Tensor) -> bytes:
    """Of its name, type, shape and bytes, wherever it is."""
    digest = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=IDENTITY_BYTES)
    for piece in pieces(tensor.detach()):
        digest.update(piece.numpy().data)
    return digest.digest()


def pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Its bytes in order, on the host."""
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return
    every = flat.view(torch.uint8)
    for start in range(0, len(every), _PIECE):
        yield every[start : start + _PIECE].cpu()
