"""Replaces vLLM's activation layers by subclasses that call one operator each.

A device then computes an activation in one pass over its input.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import activation as upstream

from vllm_backplane import ops


class BackplaneSiluAndMul(upstream.SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_and_mul.call(x)


class BackplaneMulAndSilu(upstream.MulAndSilu):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.mul_and_silu.call(x)


class BackplaneGeluAndMul(upstream.GeluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_and_mul.call(x, self.approximate)


class BackplaneFatreluAndMul(upstream.FatreluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.fatrelu_and_mul.call(x, self.threshold)


class BackplaneSiluAndMulWithClamp(upstream.SiluAndMulWithClamp):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_and_mul_with_clamp.call(x, self.swiglu_limit, self.alpha, self.beta)


class BackplaneSwigluOAIAndMul(upstream.SwigluOAIAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.swigluoai_and_mul.call(x, self.alpha, self.limit)


class BackplaneGELU(upstream.GELU):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu.call(x, "none")


class BackplaneGELUTanh(upstream.GELUTanh):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu.call(x, "tanh")


class BackplaneNewGELU(upstream.NewGELU):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_new.call(x)


class BackplaneFastGELU(upstream.FastGELU):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_fast.call(x)


class BackplaneQuickGELU(upstream.QuickGELU):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.quick_gelu.call(x)


class BackplaneReLUSquaredActivation(upstream.ReLUSquaredActivation):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.relu2.call(x)
