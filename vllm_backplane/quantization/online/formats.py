"""The formats in which weights are quantized while they are loaded, by the name that --quantization gives them.

Group sizes are chosen by perplexity (docs/quantization.md); the option `quantization_group` names another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_backplane.ops.quantized_linear import padded_size


@dataclass(frozen=True, slots=True)
class Format:
    bits: int
    group: int
    """Weights along the input that share a scale; 0: all of a row."""
    symmetric: bool = True
    """The middle code is zero; otherwise each group has an offset beside its scale."""

    def bytes_of(self, rows: int, fan_in: int) -> int:
        """Codes, scales and offsets of a weight, [rows, fan_in], without what fills blocks up."""
        padded = padded_size(fan_in, self.group)
        per_group = torch.float16.itemsize * (1 if self.symmetric else 2)
        return rows * (padded * self.bits // 8 + padded // (self.group or padded) * per_group)


ONLINE: Mapping[str, Format] = {"int8": Format(8, 64), "int4": Format(4, 32, symmetric=False)}

HEAD = ONLINE["int8"]
"""The projection to logits is 8 bits wide in every format: its errors go into the probabilities as they are."""
