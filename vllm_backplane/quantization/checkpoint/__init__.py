"""Loads GPTQ, AWQ and compressed-tensors checkpoints, and computes them with the operator `quantized_linear`.

vLLM's own classes read the formats; the classes here extend them. Only `registration.py` may be imported before vLLM
has read a quantized checkpoint.
"""

from __future__ import annotations
