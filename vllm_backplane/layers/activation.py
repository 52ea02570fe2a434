"""Replaces vLLM's activation layers by subclasses that call one operator each.

A device then computes an activation in one pass over its input.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import activation as upstream

from vllm_backplane import ops
from vllm_backplane.guards import guarded


@guarded(
    "vllm.model_executor.layers.activation:SiluAndMul.forward_native",
    why="an operator computes the same",
    feature="SiluAndMul",
)
class BackplaneSiluAndMul(upstream.SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_and_mul.call(x)


@guarded(
    "vllm.model_executor.layers.activation:MulAndSilu.forward_native",
    why="an operator computes the same",
    feature="MulAndSilu",
)
class BackplaneMulAndSilu(upstream.MulAndSilu):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.mul_and_silu.call(x)


@guarded(
    "vllm.model_executor.layers.activation:GeluAndMul.forward_native",
    why="an operator computes the same",
    feature="GeluAndMul",
)
class BackplaneGeluAndMul(upstream.GeluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_and_mul.call(x, self.approximate)


@guarded(
    "vllm.model_executor.layers.activation:FatreluAndMul.forward_native",
    why="an operator computes the same",
    feature="FatreluAndMul",
)
class BackplaneFatreluAndMul(upstream.FatreluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.fatrelu_and_mul.call(x, self.threshold)


@guarded(
    "vllm.model_executor.layers.activation:SiluAndMulWithClamp.forward_native",
    why="an operator computes the same",
    feature="SiluAndMulWithClamp",
)
class BackplaneSiluAndMulWithClamp(upstream.SiluAndMulWithClamp):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_and_mul_with_clamp.call(x, self.swiglu_limit, self.alpha, self.beta)


@guarded(
    "vllm.model_executor.layers.activation:SwigluOAIAndMul.forward_native",
    why="an operator computes the same",
    feature="SwigluOAIAndMul",
)
class BackplaneSwigluOAIAndMul(upstream.SwigluOAIAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.swigluoai_and_mul.call(x, self.alpha, self.limit)


@guarded(
    "vllm.model_executor.layers.activation:GELU.forward_native",
    why="an operator computes the same",
    feature="GELU",
)
class BackplaneGELU(upstream.GELU):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu.call(x, "none")


@guarded(
    "vllm.model_executor.layers.activation:GELUTanh.forward_native",
    why="an operator computes the same",
    feature="GELUTanh",
)
class BackplaneGELUTanh(upstream.GELUTanh):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu.call(x, "tanh")


@guarded(
    "vllm.model_executor.layers.activation:NewGELU.forward_native",
    why="an operator computes the same",
    feature="NewGELU",
)
class BackplaneNewGELU(upstream.NewGELU):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_new.call(x)


@guarded(
    "vllm.model_executor.layers.activation:FastGELU.forward_native",
    why="an operator computes the same",
    feature="FastGELU",
)
class BackplaneFastGELU(upstream.FastGELU):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gelu_fast.call(x)


@guarded(
    "vllm.model_executor.layers.activation:QuickGELU.forward_native",
    why="an operator computes the same",
    feature="QuickGELU",
)
class BackplaneQuickGELU(upstream.QuickGELU):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.quick_gelu.call(x)


@guarded(
    "vllm.model_executor.layers.activation:ReLUSquaredActivation.forward_native",
    why="an operator computes the same",
    feature="ReLUSquaredActivation",
)
class BackplaneReLUSquaredActivation(upstream.ReLUSquaredActivation):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return ops.relu2.call(x)
