"""Computes quantized experts one by one, because the operator `moe_experts` takes full-precision weights only.

The host reads which experts have tokens, so a decode step with such experts is not captured as a graph.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from vllm_backplane.errors import BackplaneError
from vllm_backplane.layers.moe import BackplaneFusedMoEMethod

ExpertLinear = Callable[[int, torch.Tensor], torch.Tensor]
"""(expert, inputs) -> outputs of one of the expert's linear layers."""


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    up: ExpertLinear,
    down: ExpertLinear,
    *,
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """Returns the weighted sum of the expert outputs of each token.

    `up` includes the activation; `down` takes its output. An id outside of the experts adds nothing. `weigh_inputs`
    applies the router weights to the inputs instead of the outputs.
    """
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    first = 0
    for expert, count in enumerate(counts[:experts]):
        if count == 0:
            continue
        chosen = order[first : first + count]
        first += count
        tokens = chosen // ids.shape[1]
        weight = weights.flatten()[chosen].unsqueeze(1).float()
        inputs = (x[tokens].float() * weight).to(x.dtype) if weigh_inputs else x[tokens]
        outputs = down(expert, up(expert, inputs)).float()
        out.index_add_(0, tokens, outputs if weigh_inputs else outputs * weight)
    return out.to(x.dtype)


class PerExpertMoEMethod(BackplaneFusedMoEMethod):
    """Packs and computes each of the experts that are stored quantized on its own.

    Subclasses create the parameters into which vLLM loads, and replace vLLM's full-precision weights, which have no
    memory.
    """

    uses_fused_operator = False
    source: ClassVar[str]
    """What the weights are loaded from, for error texts."""

    def __init__(self, moe: FusedMoEConfig, prefix: str) -> None:
        super().__init__(moe)
        if moe.activation is not MoEActivation.SILU or moe.has_bias:
            raise BackplaneError(
                f"the experts of {prefix} have biases or the activation {moe.activation.value!r}; from {self.source}, "
                "experts with SiLU and without bias are supported: use the model's full-precision checkpoint"
            )
        self._prefix = prefix

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if layer.expert_map is not None:
            raise BackplaneError(
                f"experts from {self.source} cannot be distributed among workers; remove --enable-expert-parallel"
            )
        if layer.apply_router_weight_on_input:
            raise BackplaneError(
                f"{self._prefix} applies router weights to the inputs of experts, which is not supported from "
                f"{self.source}; use the model's full-precision checkpoint"
            )
        self._device, self._dtype = torch.empty(0).device, params_dtype
        self._experts, self._hidden = num_experts, hidden_size
        self._intermediate = intermediate_size_per_partition
        with torch.device("meta"):
            super().create_weights(
                layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
            )
        self.create_parameters(layer)

    @abstractmethod
    def create_parameters(self, layer: Any) -> None:
        """Creates the parameters into which vLLM loads the experts."""

    def _clear_full_weights(self, layer: Any) -> None:
        """Replaces vLLM's full-precision parameters by empty ones on the device."""
        for name in ("w13_weight", "w2_weight"):
            setattr(layer, name, torch.nn.Parameter(torch.empty(0, device=self._device), requires_grad=False))
