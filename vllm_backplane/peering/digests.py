"""By what two servers see that they have the same: tensors by their bytes, wherever they are, and a model's
configuration without where it was read from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

DIGEST_BYTES = 32
_PIECE = 1 << 24


def without_origin(configuration: Any) -> Any:
    """A model's configuration without where it was read from."""
    if isinstance(configuration, dict):
        return {key: without_origin(value) for key, value in configuration.items() if key != "_name_or_path"}
    return configuration


def digests(named: Iterable[tuple[str, torch.Tensor]]) -> list[bytes]:
    """Of tensors with their names, in their order."""
    with ThreadPoolExecutor(4) as pool:  # hashing lets go of Python's lock
        return list(pool.map(lambda one: digest_of(*one), named))


def digest_of(name: str, tensor: torch.Tensor) -> bytes:
    """Of its name, type, shape and bytes."""
    digest = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=DIGEST_BYTES)
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
