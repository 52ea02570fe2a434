"""Mamba and Mamba2, on the operators `causal_convolution` and `selective_scan`.

vLLM's mixers call Triton kernels, one pair for prompts and one for decoding. The replacements keep vLLM's parameters,
sharding and states and compute rows of any length by the same operators (`attention/state_metadata.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_backplane import ops
from vllm_backplane.attention.state_metadata import StateMetadata
from vllm_backplane.errors import BackplaneError


def states_of(layer: Any) -> tuple[StateMetadata | None, torch.Tensor, torch.Tensor]:
    """The layer's rows, the convolution's states [slots, channels, width - 1], and the recurrence's.

    Without rows the step only measures memory, and there are no states yet.
    """
    by_layer = get_forward_context().attn_metadata
    if by_layer is None:
        return None, torch.empty(0), torch.empty(0)
    convolution, recurrence = layer.kv_cache[0], layer.kv_cache[1]
    if not is_conv_state_dim_first():
        convolution = convolution.transpose(-1, -2)
    return by_layer[layer.prefix], convolution, recurrence


def taps(layer: Any) -> torch.Tensor:
    """The convolution's weight [channels, width]; vLLM keeps it as that of a linear layer with a dimension between."""
    weight: torch.Tensor = layer.conv1d.weight
    return weight.view(weight.shape[0], weight.shape[-1])


def refuse_foreign(layers: Iterable[Any]) -> None:
    """Raise if a layer carries a state and is none of those that are replaced here: it would call Triton, or read
    metadata that it does not know."""
    foreign = {
        type(layer).__name__
        for layer in layers
        if isinstance(layer, MambaBase) and not type(layer).__module__.startswith("vllm_backplane.")
    }
    if foreign:
        raise BackplaneError(
            f"the model has layers of the kind {', '.join(sorted(foreign))}, which vLLM computes with Triton and "
            "Backplane does not compute; of layers that carry a state it has Mamba, Mamba2 and Qwen's gated delta net: "
            "choose another model"
        )


class BackplaneMambaMixer(MambaMixer):
    def forward_impl(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        x, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        rows, convolution, recurrence = states_of(self)
        if rows is None:
            output.copy_(self.out_proj(x.contiguous())[0])
            return
        tokens = rows.num_actual_tokens
        x, gate = x[:tokens], gate[:tokens]
        x = ops.causal_convolution.call(
            x, taps(self), self.conv1d.bias, convolution, *rows.places, self.activation == "silu"
        )
        times, into, out = self._ssm_transform(x)
        bias = self._time_proj_bias()
        mixed = ops.selective_scan.call(
            x.unsqueeze(-1),
            times.transpose(0, 1),
            self.A,
            into.unsqueeze(1),
            out.unsqueeze(1),
            self.D,
            bias,
            recurrence.unsqueeze(2),
            *rows.places,
            rows.longest,
        )
        mixed = mixed.squeeze(-1) * torch.nn.functional.silu(gate)
        output[:tokens] = self.out_proj(mixed)[0]


class BackplaneMambaMixer2(MambaMixer2):
    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        rows, convolution, recurrence = states_of(self)
        if rows is None:
            output.zero_()
            return
        tokens = rows.num_actual_tokens
        mixed, times = projected_states[:tokens, self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        mixed = ops.causal_convolution.call(
            mixed, self.conv_weights, self.conv1d.bias, convolution, *rows.places, self.activation == "silu"
        )
        x, into, out = self.split_hidden_states_B_C_fn(mixed)
        groups = self.n_groups // self.tp_size
        result = ops.selective_scan.call(
            x.reshape(tokens, -1, self.head_dim),
            times,
            self.A.unsqueeze(-1),
            into.reshape(tokens, groups, -1),
            out.reshape(tokens, groups, -1),
            self.D,
            self.dt_bias,
            recurrence,
            *rows.places,
            rows.longest,
        )
        output[:tokens] = result.view(tokens, -1)
