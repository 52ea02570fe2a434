"""What two workers must have in common for one to use the other's blocks: every weight, the model's configuration, how
the KV cache is laid out, and the worker's part of the model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from vllm_backplane.kv_tier.wire import IDENTITY_BYTES
from vllm_backplane.loopback.sameness import digests


def identity(model: torch.nn.Module, description: dict[str, Any]) -> bytes:
    """Of all bytes, not of samples: models that differ in a few rows must not share."""
    whole = hashlib.blake2b(json.dumps(description, sort_keys=True, default=str).encode(), digest_size=IDENTITY_BYTES)
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda named: named[0])
    for digest in digests(tensors):
        whole.update(digest)
    return whole.digest()
