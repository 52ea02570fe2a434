"""vLLM's attention interface, bound to the operators of `ops/`: backends, metadata and their selection.

These modules may import vLLM, `ops/` and `device/`.
"""

from __future__ import annotations
