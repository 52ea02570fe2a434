"""Experts as products of their own, where weights are in a form that no operator takes for all experts at once.

Which experts have tokens is read on the host, so a step with such experts is not replayed as a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Product = Callable[[int, torch.Tensor], torch.Tensor]
"""(expert, tokens) -> what becomes of them."""


def computed(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    up: Product,
    down: Product,
    *,
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """The weighted sum over the experts of each token; `down` takes what `up` gave, activated already. An id that is
    none of the experts' adds nothing."""
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
        made = down(expert, up(expert, inputs)).float()
        out.index_add_(0, tokens, made if weigh_inputs else made * weight)
    return out.to(x.dtype)
