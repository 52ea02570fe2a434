"""Computes gated delta nets (Qwen3-Next, Qwen3.5) with the operators `causal_convolution` and `gated_delta_rule`.

vLLM's layer calls CUDA and Triton kernels. The subclass keeps vLLM's parameters, sharding and states.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from vllm_backplane import ops
from vllm_backplane.guards import guarded
from vllm_backplane.layers.mamba import convolution_weight, metadata_and_states

_EPSILON = 1e-6
"""Added to a squared length before the square root, as in the training of these models."""


def _l2_normalized(vectors: torch.Tensor) -> torch.Tensor:
    wide = vectors.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + _EPSILON)


@guarded(
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.forward",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.forward_cuda",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._output_projection",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.split_ba",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.fix_query_key_value_ordering",
    why="the layer is computed by operators, in the same order",
    feature="gated delta net",
)
class BackplaneQwenGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mixed, gate, strength, decay = self._projections(hidden_states)
        shape = (hidden_states.shape[0], self.num_v_heads // self.tp_size, self.head_v_dim)
        result = torch.zeros(shape, dtype=hidden_states.dtype, device=hidden_states.device)
        metadata, conv_state, ssm_state = metadata_and_states(self)
        if metadata is not None:
            tokens = metadata.num_actual_tokens
            mixed = ops.causal_convolution.call(
                mixed[:tokens],
                convolution_weight(self),
                self.conv1d.bias,
                conv_state,
                *metadata.row_arguments,
                self.activation in ("silu", "swish"),
            )
            key_size, value_size = self.key_dim // self.tp_size, self.value_dim // self.tp_size
            query, key, value = mixed.split([key_size, key_size, value_size], dim=-1)
            result[:tokens] = ops.gated_delta_rule.call(
                _l2_normalized(query.reshape(tokens, -1, self.head_k_dim)) * self.head_k_dim**-0.5,
                _l2_normalized(key.reshape(tokens, -1, self.head_k_dim)),
                value.reshape(tokens, -1, self.head_v_dim),
                -self.A_log.float().exp() * softplus(decay[:tokens].float() + self.dt_bias.float()),
                strength[:tokens].float().sigmoid(),
                ssm_state,
                *metadata.row_arguments,
                metadata.max_query_len,
            )
        output: torch.Tensor = self._output_projection(result, gate)
        return output

    def _projections(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns query, key and value in one tensor, the gate, and the logits of strength and decay."""
        tokens = hidden_states.shape[0]
        mixed_ba = self.in_proj_ba(hidden_states)[0]
        if not self.gqa_interleaved_layout:
            value_size = self.value_dim // self.tp_size
            mixed, gate = self.in_proj_qkvz(hidden_states)[0].split(
                [2 * self.key_dim // self.tp_size + value_size, value_size], dim=-1
            )
            strength, decay = self.split_ba(mixed_ba)
            return mixed, gate.reshape(tokens, -1, self.head_v_dim), strength, decay
        query, key, value, gate, strength, decay = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states)[0], mixed_ba
        )
        mixed = torch.cat([part.reshape(tokens, -1) for part in (query, key, value)], dim=-1)
        return mixed, gate, strength, decay
