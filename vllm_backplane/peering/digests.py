"""Computes digests by which two servers see that they have the same model: of tensors on any device, by name, dtype,
shape and bytes. Also strips a model's configuration of the path that it was read from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 24


def without_model_path(configuration: Any) -> Any:
    """Returns a model's configuration without the path or name that it was read from, at every level."""
    if isinstance(configuration, dict):
        return {key: without_model_path(value) for key, value in configuration.items() if key != "_name_or_path"}
    return configuration


def tensor_digests(named: Iterable[tuple[str, torch.Tensor]]) -> list[bytes]:
    """Returns the digests of named tensors, in the given order."""
    with ThreadPoolExecutor(4) as pool:  # hashing releases Python's global lock
        return list(pool.map(lambda item: tensor_digest(*item), named))


def tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """Returns a digest of a tensor's name, dtype, shape and bytes."""
    digest = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=DIGEST_BYTES)
    for chunk in byte_chunks(tensor.detach()):
        digest.update(chunk.numpy().data)
    return digest.digest()


def byte_chunks(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Yields the bytes of a tensor in order, as uint8 tensors of at most 16 MiB on the host."""
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return
    every = flat.view(torch.uint8)
    for start in range(0, len(every), _CHUNK_BYTES):
        yield every[start : start + _CHUNK_BYTES].cpu()
