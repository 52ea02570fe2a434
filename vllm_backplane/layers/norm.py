"""Replaces vLLM's Gemma norm by a subclass that calls the operators `gemma_rms_norm` and `fused_add_gemma_rms_norm`.

Plain RMSNorm needs no subclass: vLLM computes it through an IR operator, which `binding/ir.py` implements.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from vllm_backplane import ops
from vllm_backplane.guards import guarded


@guarded(
    "vllm.model_executor.layers.layernorm:GemmaRMSNorm.forward_native",
    why="operators compute the same",
    feature="GemmaRMSNorm",
)
class BackplaneGemmaRMSNorm(GemmaRMSNorm):
    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return ops.gemma_rms_norm.call(x, self.weight, self.variance_epsilon)
        return ops.fused_add_gemma_rms_norm.call(x, residual, self.weight, self.variance_epsilon)
