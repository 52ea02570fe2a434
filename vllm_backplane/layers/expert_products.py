"""Experts as products of their own, where weights are in a form that no operator takes for all experts at once.

Which experts have tokens is read on the host, so a step with such experts is not replayed as a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Product = Callable[[int, torch.Tensor], torch.Tensor]
"""(expert, tokens) -> what becomes of them."""


def computed(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: int, up: Product, down: Product
) -> torch.Tensor:
    """The weighted sum over the experts of each token; `down` takes what `up` gave, activated already."""
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    first = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        chosen = order[first : first + count]
        first += count
        tokens = chosen // ids.shape[1]
        made = down(expert, up(expert, x[tokens])).float()
        out.index_add_(0, tokens, made * weights.flatten()[chosen].unsqueeze(1).float())
    return out.to(x.dtype)
