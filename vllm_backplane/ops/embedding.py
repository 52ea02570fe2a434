"""Declares the operators at both ends of a model: token ids to vectors, and vectors to logits over the vocabulary.

`logits` computes the same as a linear layer but is used differently: its weight is the largest matrix of a small
model, is often shared with the embedding, and is multiplied with the sampled rows only. A device may store it in
another layout or precision than other weights, so it is an operator of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.ops.linear import projection_samples
from vllm_backplane.ops.operator import DEFAULT_TOLERANCES, EXACT, Sample, SampleSpace, operator


def _samples(space: SampleSpace) -> Iterator[Sample]:
    for shape in ((1,), (7,), (2, 5), (0,)):
        yield Sample(f"ids {shape}", (space.integers(33, *shape), space.normal(33, 24)))
    yield Sample("32-bit ids", (space.integers(33, 5, dtype=torch.int32), space.normal(33, 24)))
    yield Sample("one row many times", (space.integers(1, 6, low=0), space.normal(3, 8)))


@operator(
    "(Tensor ids, Tensor weight) -> Tensor",
    samples=_samples,
    tolerances=dict.fromkeys(DEFAULT_TOLERANCES, EXACT),
)
def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the rows of weight at the indices ids, which have any shape and are within the table."""
    return torch.nn.functional.embedding(ids, weight)


@operator("(Tensor hidden, Tensor weight, Tensor? bias=None) -> Tensor", samples=projection_samples)
def logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns hidden @ weight.T + bias, one score per vocabulary entry; weight is [vocabulary, hidden]."""
    return torch.nn.functional.linear(hidden, weight, bias)
