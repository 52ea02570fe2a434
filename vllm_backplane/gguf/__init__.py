"""GGUF files: read without trust, described to vLLM, and their blocks brought into the form the kernels multiply.

`header`, `file` and `parts` import neither torch nor vLLM; nothing in this folder imports vLLM.
"""

from __future__ import annotations
