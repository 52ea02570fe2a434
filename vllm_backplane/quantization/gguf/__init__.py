"""Loads models from GGUF files: the load format `gguf`, and the methods that pack blocks for `quantized_linear`.

The package `vllm_backplane.gguf` reads the files; it does not import vLLM.
"""

from __future__ import annotations
