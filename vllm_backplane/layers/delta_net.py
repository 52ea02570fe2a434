"""The gated delta net of Qwen3-Next and Qwen3.5, on the operators `causal_convolution` and `gated_delta_rule`.

vLLM's layer calls kernels of CUDA and Triton. The replacement keeps its parameters, sharding and states.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from vllm_backplane import ops
from vllm_backplane.layers.mamba import states_of, taps

_SMALLEST = 1e-6
"""Added to a squared length before its root is taken, as the models were trained."""


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    wide = vectors.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + _SMALLEST)


class BackplaneQwenGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mixed, gate, strength, decay = self._projections(hidden_states)
        shape = (hidden_states.shape[0], self.num_v_heads // self.tp_size, self.head_v_dim)
        result = torch.zeros(shape, dtype=hidden_states.dtype, device=hidden_states.device)
        rows, convolution, recurrence = states_of(self)
        if rows is not None:
            tokens = rows.num_actual_tokens
            mixed = ops.causal_convolution.call(
                mixed[:tokens],
                taps(self),
                self.conv1d.bias,
                convolution,
                *rows.places,
                self.activation in ("silu", "swish"),
            )
            keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
            query, key, value = mixed.split([keys, keys, values], dim=-1)
            result[:tokens] = ops.gated_delta_rule.call(
                _unit(query.reshape(tokens, -1, self.head_k_dim)) * self.head_k_dim**-0.5,
                _unit(key.reshape(tokens, -1, self.head_k_dim)),
                value.reshape(tokens, -1, self.head_v_dim),
                -self.A_log.float().exp() * softplus(decay[:tokens].float() + self.dt_bias.float()),
                strength[:tokens].float().sigmoid(),
                recurrence,
                *rows.places,
                rows.longest,
            )
        output: torch.Tensor = self._output_projection(result, gate)
        return output

    def _projections(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value side by side; the gate; the strength's and the decay's logits."""
        tokens = hidden_states.shape[0]
        mixed_ba = self.in_proj_ba(hidden_states)[0]
        if not self.gqa_interleaved_layout:
            values = self.value_dim // self.tp_size
            mixed, gate = self.in_proj_qkvz(hidden_states)[0].split(
                [2 * self.key_dim // self.tp_size + values, values], dim=-1
            )
            strength, decay = self.split_ba(mixed_ba)
            return mixed, gate.reshape(tokens, -1, self.head_v_dim), strength, decay
        query, key, value, gate, strength, decay = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states)[0], mixed_ba
        )
        mixed = torch.cat([part.reshape(tokens, -1) for part in (query, key, value)], dim=-1)
        return mixed, gate, strength, decay
