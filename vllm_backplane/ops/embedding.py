"""The two ends of a model: token ids to vectors, and vectors to logits over the vocabulary.

`logits` is a linear layer in form but not in use: the weight is the largest matrix of a small model, often
shared with the embedding, and it meets only the sampled rows. A device may hold it in another layout or
precision than the rest, so it is an operator of its own.
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
    """The rows of weight that ids name; ids of any shape, all within the table."""
    return torch.nn.functional.embedding(ids, weight)


@operator("(Tensor hidden, Tensor weight, Tensor? bias=None) -> Tensor", samples=projection_samples)
def logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """hidden @ weight.T + bias: one score per vocabulary entry; weight is [vocabulary, hidden]."""
    return torch.nn.functional.linear(hidden, weight, bias)
