"""Quantized weights on the operator `quantized_linear`, in three families.

`online/` quantizes a full-precision checkpoint while it is loaded, `checkpoint/` loads GPTQ, AWQ and compressed-tensors
checkpoints, and `gguf/` loads GGUF files. These modules may import vLLM, `ops/`, `device/`, `layers/`, `settings/` and
the package `vllm_backplane.gguf`; the three families do not import each other.
"""

from __future__ import annotations
