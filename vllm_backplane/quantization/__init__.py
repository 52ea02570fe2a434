"""Loads or makes quantized weights, and computes with the operator `quantized_linear`, in three families.

`online/` quantizes a full-precision checkpoint while it is loaded, `checkpoint/` loads GPTQ, AWQ and compressed-tensors
checkpoints, and `gguf/` loads GGUF files. The three families do not import each other.
"""

from __future__ import annotations
