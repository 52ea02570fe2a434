"""vLLM's layers, bound to the operators of `ops/`.

These modules may import vLLM, `ops/`, `device/`, `settings/`, `attention/` and the runtime. `quantization/` builds on
them; they import nothing from it.
"""

from __future__ import annotations
