"""Declares the operator for rotary position embedding, in place.

Query and key are usually slices of one fused projection, so their rows are far apart in memory, and an
implementation must write only the head dimensions that it rotates. The rotation is computed in the dtype of the
cosine and sine table, or in the query's if that is wider. The table thus decides the precision: a table in the
query's dtype gives the results of vLLM, a float32 table rounds once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import DEFAULT_TOLERANCES, Sample, SampleSpace, Tolerance, nothing, operator

_TOLERANCES = {
    **DEFAULT_TOLERANCES,
    # With a half-precision table, the reference rounds each product before the difference, which may cancel. A
    # kernel that rounds once is more accurate and must not fail for it.
    torch.float16: Tolerance(2e-3, 6e-3),
    torch.bfloat16: Tolerance(1.6e-2, 5e-2),
}


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_size: int, neox: bool) -> None:
    tokens, half = cos.shape[0], cos.shape[-1]
    if x.shape[-1] % head_size or x.numel() % (tokens * head_size):
        raise OperatorError(
            f"rotary_embedding: shape {tuple(x.shape)} does not consist of whole heads of {head_size} for "
            f"{tokens} positions; pass the head size that the projection was built with"
        )
    heads = x.view(tokens, x.numel() // (tokens * head_size), head_size)
    if neox:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    else:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    first.copy_(rotated_first)
    second.copy_(rotated_second)


def _table(space: SampleSpace, positions: int, rotary_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), -1).to(space.dtype).to(space.device)


def _samples(space: SampleSpace) -> Iterator[Sample]:
    for neox in (True, False):
        style = "halves" if neox else "pairs"
        for tokens, heads, kv_heads, head, rotary in ((1, 4, 4, 8, 8), (5, 6, 2, 16, 16), (7, 3, 1, 20, 12)):
            yield Sample(
                f"{style}, {tokens} tokens, {heads}/{kv_heads} heads of {head}, {rotary} rotated",
                (
                    space.integers(64, tokens),
                    space.normal(tokens, heads * head),
                    space.normal(tokens, kv_heads * head),
                    _table(space, 64, rotary),
                    head,
                    neox,
                ),
            )
        fused = space.normal(6, (4 + 2 + 2) * 16)
        yield Sample(
            f"{style}, slices of a fused projection",
            (space.integers(64, 6), fused[:, :64], fused[:, 64:96], _table(space, 64, 16), 16, neox),
        )
        yield Sample(
            f"{style}, separate head dimension, no key, positions of two dimensions",
            (space.integers(64, 2, 3), space.normal(6, 4, 16), None, _table(space, 64, 8), 16, neox),
        )
    yield Sample(
        "no tokens",
        (space.integers(8, 0), space.normal(0, 32), space.normal(0, 16), _table(space, 8, 16), 16, True),
    )
    yield Sample(
        "one position for all",
        (space.integers(64, 1).expand(4), space.normal(4, 32), None, _table(space, 64, 16), 16, True),
    )


@operator(
    "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, Tensor cos_sin_cache, int head_size, bool neox) -> ()",
    samples=_samples,
    fake=nothing,
    tolerances=_TOLERANCES,
)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    neox: bool,
) -> None:
    """Rotates the leading dimensions of each head by its position's angles, in place.

    `query` and `key` are [tokens, heads * head_size] or [tokens, heads, head_size] with a contiguous last
    dimension. `cos_sin_cache` is [positions, rotary_dim], cosines first. With `neox`, dimension i is paired with
    i + rotary_dim/2, otherwise neighbours are paired; the other dimensions of a head do not change.
    """
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or rotary_dim > head_size:
        raise OperatorError(
            f"rotary_embedding: the table has {rotary_dim} columns for heads of {head_size}; it needs an "
            "even number, at most the head size"
        )
    if positions.numel() == 0:
        return
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, -1)
    _rotate(query, cos, sin, head_size, neox)
    if key is not None:
        _rotate(key, cos, sin, head_size, neox)
