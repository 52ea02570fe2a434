"""Makes transformers models whose weights are decoded from quantized codes, as references for quantized engines.

The decoding follows the definition of the layout and does not use Backplane's operator: it decodes one input position
at a time for all outputs, rounds inputs to 8 bits by the definition, and multiplies with PyTorch in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import reference
import torch

from vllm_backplane.device import CodeLayout
from vllm_backplane.ops.quantized_linear import Packed, packed
from vllm_backplane.quantization.online.formats import Format


def decoded(made: Packed, bits: int, rows: int, size: int) -> torch.Tensor:
    """Returns the weight [rows, size] that the codes encode."""
    codes, scales = made.codes.numpy(), made.scales.float().numpy()
    offsets = scales * -(2.0 ** (bits - 1)) if made.offsets is None else made.offsets.float().numpy()
    blocks, groups, width = scales.shape
    per_step = 4 if bits == 8 else 8
    group = codes.shape[1] * per_step // groups
    weight = np.empty((blocks * width, size), dtype=np.float32)
    for position in range(size):
        step, within = divmod(position, per_step)
        code = codes[:, step, :, within % 4].astype(np.int32)
        if bits == 4:
            code = code // 16 if within >= 4 else code % 16
        weight[:, position] = (code * scales[:, position // group] + offsets[:, position // group]).reshape(-1)
    return torch.from_numpy(weight[:rows])


class Decoded(torch.nn.Module):
    """Computes a linear layer whose weight was quantized and decoded, and rounds its inputs to 8 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, chosen: Format) -> None:
        super().__init__()
        made = packed(weight.detach(), chosen.bits, chosen.group, CodeLayout(8), symmetric=chosen.symmetric)
        self.weight, self.bias = decoded(made, chosen.bits, *weight.shape), bias
        self.group = chosen.group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.rounded(part) for part in x.split(self.group, dim=-1)]
        return torch.nn.functional.linear(torch.cat(parts, dim=-1), self.weight, self.bias)

    @staticmethod
    def rounded(x: torch.Tensor) -> torch.Tensor:
        """Rounds one group of inputs to 8 bits, with one scale per token."""
        largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return (x * torch.full_like(largest, 127.0).div(largest)).round() * largest / 127


class DecodedExperts(torch.nn.Module):
    """Replaces the experts of transformers, which have the weights of all experts in one tensor."""

    def __init__(self, layer: Any, chosen: Format) -> None:
        super().__init__()
        self.up = [Decoded(weight, None, chosen) for weight in layer.gate_up_proj]
        self.down = [Decoded(weight, None, chosen) for weight in layer.down_proj]

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            tokens, place = (index == expert).nonzero(as_tuple=True)
            gate, value = up(x[tokens]).chunk(2, dim=-1)
            made = down(torch.nn.functional.silu(gate) * value)
            out.index_add_(0, tokens, made * weights[tokens, place].unsqueeze(1))
        return out


def load(folder: Path, body: Format, head: Format, *, experts: bool = True) -> Any:
    """Loads a model, and replaces its linear layers and, with `experts`, its experts by quantized and decoded ones.

    The embedding is not replaced.
    """
    model = reference.load(folder)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            model.set_submodule(name, Decoded(layer.weight, layer.bias, head if name == "lm_head" else body))
        elif experts and name.endswith(".experts"):
            model.set_submodule(name, DecodedExperts(layer, body))
    return model
