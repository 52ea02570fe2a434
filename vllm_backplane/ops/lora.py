"""Declares the operators for LoRA adapters; the tokens of one batch may use different adapters.

Adapters are stacked, one slot each. `indices` [tokens] has the slot of each token; any number that is not a
slot, -1 by convention, means no adapter, and a captured batch may have arbitrary numbers in its padding.
The low-rank activations stay in float32 between the two matrix products. The references loop over all slots,
because slots are few and no value has to be read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.ops.operator import Sample, SampleSpace, Tolerance, nothing, operator

_TOLERANCES = {
    torch.float32: Tolerance(1e-4, 1e-4),
    torch.float16: Tolerance(5e-3, 5e-3),
    torch.bfloat16: Tolerance(2e-2, 2e-2),
}


def _cases(space: SampleSpace) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yields (label, indices, number of adapters)."""
    yield "mixed", space.integers(3, 9, low=-1), 3
    yield "no adapter", space.tensor([-1, -1, -1], torch.int64), 2
    yield "one adapter", space.tensor([0, 0], torch.int64), 1
    yield "padding", space.tensor([1, -7, 12345], torch.int64), 2
    yield "no token", space.tensor([], torch.int64), 2


def _shrink_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, indices, adapters in _cases(space):
        x, lora_a = space.normal(indices.shape[0], 40), space.normal(adapters, 8, 40) / 6
        yield Sample(label, (x, lora_a, indices, 0.5))


@operator(
    "(Tensor x, Tensor lora_a, Tensor indices, float scale) -> Tensor",
    samples=_shrink_samples,
    tolerances=_TOLERANCES,
)
def lora_shrink(x: torch.Tensor, lora_a: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns scale * x lora_a^T with each token's adapter, in float32; zero for a token without adapter.

    x [tokens, width]; lora_a [adapters, rank, width]; the result is [tokens, rank].
    """
    wide = x.float()
    result = torch.zeros((x.shape[0], lora_a.shape[1]), dtype=torch.float32, device=x.device)
    for slot in range(lora_a.shape[0]):
        product = wide @ lora_a[slot].float().t() * scale
        result = torch.where((indices == slot).unsqueeze(1), product, result)
    return result


def _expand_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, indices, adapters in _cases(space):
        tokens = indices.shape[0]
        x = space.normal(tokens, 8, dtype=torch.float32)
        lora_b = space.normal(adapters, 24, 8) / 3
        yield Sample(f"{label}, all columns", (space.normal(tokens, 24), x, lora_b, indices))
        yield Sample(f"{label}, a slice", (space.normal(tokens, 60), x, lora_b, indices, 30, 20))
        yield Sample(f"{label}, replacing", (space.normal(tokens, 30), x, lora_b, indices, 2, None, False))


@operator(
    "(Tensor(a!) y, Tensor x, Tensor lora_b, Tensor indices, int offset=0, int? size=None, bool add=True) -> ()",
    samples=_expand_samples,
    fake=nothing,
    tolerances=_TOLERANCES,
)
def lora_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_b: torch.Tensor,
    indices: torch.Tensor,
    offset: int = 0,
    size: int | None = None,
    add: bool = True,
) -> None:
    """Adds x lora_b^T, with each token's adapter, to `size` columns of y from `offset` on.

    y [tokens, any width]; x [tokens, rank]; lora_b [adapters, at least size, rank]. Without `size`, all of
    lora_b's rows that fit into y are used. With add=False the columns are replaced, by zero for a token
    without adapter.
    """
    width = min(lora_b.shape[1], y.shape[1] - offset) if size is None else size
    target = y[:, offset : offset + width]
    wide = x.float()
    change = torch.zeros((x.shape[0], width), dtype=torch.float32, device=x.device)
    for slot in range(lora_b.shape[0]):
        product = wide @ lora_b[slot, :width].float().t()
        change = torch.where((indices == slot).unsqueeze(1), product, change)
    target.copy_(target.float() + change if add else change)
