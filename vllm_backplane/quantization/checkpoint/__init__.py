"""Checkpoints that GPTQ, AWQ and compressed-tensors made, on the operator `quantized_linear`."""

from __future__ import annotations
