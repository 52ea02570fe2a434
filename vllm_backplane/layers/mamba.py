"""Computes Mamba and Mamba2 layers with the operators `causal_convolution` and `selective_scan`.

vLLM's mixers call Triton kernels, one pair for prefill and one for decode. The subclasses keep vLLM's parameters,
sharding and states. Their operators take requests of any query length, so prefill and decode use the same ones
(`attention/state_metadata.py`).
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
from vllm_backplane.guards import guarded


def metadata_and_states(layer: Any) -> tuple[StateMetadata | None, torch.Tensor, torch.Tensor]:
    """Returns the layer's metadata, its convolution states [slots, channels, width - 1] and its recurrent states.

    The metadata is None in a run that profiles memory; there are no states yet.
    """
    by_layer = get_forward_context().attn_metadata
    if by_layer is None:
        return None, torch.empty(0), torch.empty(0)
    conv_state, ssm_state = layer.kv_cache[0], layer.kv_cache[1]
    if not is_conv_state_dim_first():
        conv_state = conv_state.transpose(-1, -2)
    return by_layer[layer.prefix], conv_state, ssm_state


def convolution_weight(layer: Any) -> torch.Tensor:
    """Returns the weight of the convolution, [channels, width]. vLLM stores it as [channels, 1, width]."""
    weight: torch.Tensor = layer.conv1d.weight
    return weight.view(weight.shape[0], weight.shape[-1])


def refuse_unsupported_state_layers(layers: Iterable[Any]) -> None:
    """Raises BackplaneError if a layer with a recurrent state is not one of Backplane's classes. Such a layer would
    call Triton, or fail on Backplane's metadata."""
    unsupported = {
        type(layer).__name__
        for layer in layers
        if isinstance(layer, MambaBase) and not type(layer).__module__.startswith("vllm_backplane.")
    }
    if unsupported:
        raise BackplaneError(
            f"the model has layers of the kind {', '.join(sorted(unsupported))}, which vLLM computes with Triton and "
            "Backplane does not support; of the layers with a recurrent state it supports Mamba, Mamba2 and Qwen's "
            "gated delta net: choose another model"
        )


@guarded(
    "vllm.model_executor.layers.mamba.mamba_mixer:MambaMixer.forward_impl",
    "vllm.model_executor.layers.mamba.mamba_mixer:MambaMixer._ssm_transform",
    "vllm.model_executor.layers.mamba.mamba_mixer:MambaMixer._time_proj_bias",
    why="the layer is computed by operators, in the same order",
    feature="MambaMixer",
)
class BackplaneMambaMixer(MambaMixer):
    def forward_impl(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        x, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        metadata, conv_state, ssm_state = metadata_and_states(self)
        if metadata is None:
            output.copy_(self.out_proj(x.contiguous())[0])
            return
        tokens = metadata.num_actual_tokens
        x, gate = x[:tokens], gate[:tokens]
        x = ops.causal_convolution.call(
            x,
            convolution_weight(self),
            self.conv1d.bias,
            conv_state,
            *metadata.row_arguments,
            self.activation == "silu",
        )
        dt, b, c = self._ssm_transform(x)
        dt_bias = self._time_proj_bias()
        mixed = ops.selective_scan.call(
            x.unsqueeze(-1),
            dt.transpose(0, 1),
            self.A,
            b.unsqueeze(1),
            c.unsqueeze(1),
            self.D,
            dt_bias,
            ssm_state.unsqueeze(2),
            *metadata.row_arguments,
            metadata.max_query_len,
        )
        mixed = mixed.squeeze(-1) * torch.nn.functional.silu(gate)
        output[:tokens] = self.out_proj(mixed)[0]


@guarded(
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.__init__",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.conv_ssm_forward",
    why="the layer is computed by operators, in the same order",
    feature="MambaMixer2",
)
class BackplaneMambaMixer2(MambaMixer2):
    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        metadata, conv_state, ssm_state = metadata_and_states(self)
        if metadata is None:
            output.zero_()
            return
        tokens = metadata.num_actual_tokens
        mixed, dt = projected_states[:tokens, self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        mixed = ops.causal_convolution.call(
            mixed,
            self.conv_weights,
            self.conv1d.bias,
            conv_state,
            *metadata.row_arguments,
            self.activation == "silu",
        )
        x, b, c = self.split_hidden_states_B_C_fn(mixed)
        groups = self.n_groups // self.tp_size
        result = ops.selective_scan.call(
            x.reshape(tokens, -1, self.head_dim),
            dt,
            self.A.unsqueeze(-1),
            b.reshape(tokens, groups, -1),
            c.reshape(tokens, groups, -1),
            self.D,
            self.dt_bias,
            ssm_state,
            *metadata.row_arguments,
            metadata.max_query_len,
        )
        output[:tokens] = result.view(tokens, -1)
