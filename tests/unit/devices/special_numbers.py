"""Provides numbers for which kernels are most often wrong."""

from __future__ import annotations

import torch

NAN, INF = float("nan"), float("inf")


def special(*shape: int) -> torch.Tensor:
    """Returns numbers over the range of half precision, including NaN, infinities, zeros and subnormals."""
    values = torch.randn(shape) * torch.exp2(torch.randint(-28, 18, shape).float())
    flat = values.flatten()
    for number in (NAN, INF, -INF, 0.0, -0.0, 6e-8, -5.9e-8, 65504.0, 65519.0, 65520.0, 3.4e38, 1e-40):
        if flat.numel() > 40:
            flat[torch.randint(flat.numel(), (2,))] = number
    return flat.view(shape)
