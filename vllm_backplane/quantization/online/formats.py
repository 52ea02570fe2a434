"""Defines the weight formats of `--quantization int8` and `int4`.

The group sizes were chosen by perplexity (docs/serve/quantization.md). The option `quantization_group` overrides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_backplane.ops.quantized_linear import padded_size


@dataclass(frozen=True, slots=True)
class Format:
    """Describes how a weight is quantized: bits of a code, and the weights that share a scale."""

    bits: int
    group: int
    """Weights along the input that share a scale; 0 for a whole row."""
    symmetric: bool = True
    """Whether the middle code is zero. Otherwise each group has an offset and a scale."""

    def bytes_of(self, rows: int, fan_in: int) -> int:
        """Returns the bytes of the codes, scales and offsets of a weight [rows, fan_in], without padding of blocks."""
        padded = padded_size(fan_in, self.group)
        per_group = torch.float16.itemsize * (1 if self.symmetric else 2)
        return rows * (padded * self.bits // 8 + padded // (self.group or padded) * per_group)


ONLINE: Mapping[str, Format] = {"int8": Format(8, 64), "int4": Format(4, 32, symmetric=False)}

HEAD = ONLINE["int8"]
"""Format of the LM head under every value of --quantization. Its rounding errors affect the logits directly, so it has
8 bits."""
