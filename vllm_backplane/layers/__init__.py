"""Replaces vLLM's layers by subclasses that compute with the operators of `ops/`.

Quantized layers are in `quantization/`, which builds on these.
"""

from __future__ import annotations
