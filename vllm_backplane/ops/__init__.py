"""The operators: what a device may own. One file per family; importing this package declares them all.

Knows nothing of vLLM. `layers/` binds vLLM's layers and kernels to these.
"""

from vllm_backplane.ops.norms import fused_add_gemma_rms_norm, fused_add_rms_norm, gemma_rms_norm, rms_norm

__all__ = ["fused_add_gemma_rms_norm", "fused_add_rms_norm", "gemma_rms_norm", "rms_norm"]
