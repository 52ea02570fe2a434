"""Reads and validates GGUF files, makes vLLM's configuration and tokenizer from them, and packs their blocks for GEMM.

Nothing in this folder imports vLLM. `cursor`, `file` and `model_files` import no torch either.
"""

from __future__ import annotations
