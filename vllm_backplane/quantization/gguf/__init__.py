"""Layers whose weights come from a GGUF file as blocks, on the operator `quantized_linear`."""

from __future__ import annotations
