"""Declares the sampling operators: argmax, masks (grammar, top-k, top-p, min-p), penalties and the random draw.

Logits are float32 [batch, vocabulary] and must never be copied to the host: no operator here synchronizes.
The caller draws the random numbers, because seeds belong to requests. The draw itself is a race of exponential
clocks, which needs neither a cumulative sum nor the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.ops.operator import EXACT, FLOAT32, FLOAT32_EXACT, Sample, SampleSpace, nothing, operator


def _greedy_samples(space: SampleSpace) -> Iterator[Sample]:
    for shape in ((1, 5), (4, 1000), (3, 32003), (0, 16), (2, 1)):
        yield Sample(f"{shape}", (space.normal(*shape),))
    yield Sample("ties", (space.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], space.dtype),))
    banned = space.normal(2, 9)
    banned[:, :4] = -float("inf")
    yield Sample("banned tokens", (banned,))


def _greedy_fake(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@operator("(Tensor logits) -> Tensor", samples=_greedy_samples, fake=_greedy_fake)
def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns the index of the largest logit of each row; of equal ones the first."""
    return logits.argmax(dim=-1)


_BITS = 32
"""Number of tokens in one word of a grammar's bit mask."""


def _allowed_samples(space: SampleSpace) -> Iterator[Sample]:
    def some(rows: int, words: int) -> torch.Tensor:
        return space.integers(1 << 31, rows, words, low=-(1 << 31), dtype=torch.int32)

    for shape in ((1, 64), (3, 1000), (2, 5), (0, 40)):
        yield Sample(f"{shape}", (space.normal(*shape), some(shape[0], -(-shape[1] // _BITS))))
    everything, nothing_at_all = [-1, -1], [0, 0]
    yield Sample("all and none", (space.normal(2, 40), space.tensor([everything, nothing_at_all], torch.int32)))
    yield Sample("a mask that is shorter", (space.normal(1, 100), space.tensor([[5, 0]], torch.int32)))
    yield Sample("a mask that is longer", (space.normal(1, 33), some(1, 4)))


@operator(
    "(Tensor(a!) logits, Tensor allowed) -> ()",
    samples=_allowed_samples,
    fake=nothing,
    tolerances=dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), EXACT),
)
def allowed_tokens_mask(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Sets the logits of tokens whose bit in `allowed` is 0 to -inf.

    `allowed` is int32 [batch, words], 32 tokens each, the lowest bit first. Logits of tokens past the end of the mask
    do not change.
    """
    bits = (allowed.unsqueeze(-1) >> torch.arange(_BITS, dtype=torch.int32, device=allowed.device)) & 1
    bits = bits.flatten(1)[:, : logits.shape[-1]]
    logits[:, : bits.shape[-1]].masked_fill_(bits == 0, -float("inf"))


def _top_k_top_p_samples(space: SampleSpace) -> Iterator[Sample]:
    def k(*values: int) -> torch.Tensor:
        return space.tensor(values, torch.int32)

    def p(*values: float) -> torch.Tensor:
        return space.tensor(values, torch.float32)

    yield Sample("k", (space.normal(3, 50) * 3, k(1, 7, 50), None))
    yield Sample("p", (space.normal(3, 50) * 3, None, p(0.05, 0.9, 1.0)))
    yield Sample("k and p", (space.normal(4, 999) * 3, k(1, 40, 999, 40), p(0.5, 0.95, 0.7, 1.0)))
    yield Sample("neither", (space.normal(2, 9), None, None))
    yield Sample("empty batch", (space.normal(0, 9), k(), p()))
    yield Sample("ties at k", (space.tensor([[1.0, 2.0, 2.0, 0.0]], space.dtype), k(1), None))
    banned = space.normal(2, 12)
    banned[:, 3:] = -float("inf")
    yield Sample("banned tokens", (banned, k(6, 2), p(0.9, 0.9)))


@operator(
    "(Tensor(a!) logits, Tensor? k, Tensor? p) -> ()",
    samples=_top_k_top_p_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def top_k_top_p_mask(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> None:
    """Sets the logits that top-k and then top-p exclude to -inf; k = vocabulary and p = 1 exclude nothing.

    All logits equal to the k-th largest stay. Top-p drops the least likely tokens whose probabilities,
    renormalized after top-k, sum to at most 1 - p; the most likely token always stays. Which of several equally
    likely tokens stay at that limit is not defined.
    """
    if k is None and p is None:
        return
    vocabulary = logits.shape[-1]
    ascending, order = logits.sort(dim=-1)
    dropped = torch.zeros_like(ascending, dtype=torch.bool)
    if k is not None:
        kth = (vocabulary - k.long().clamp(1, vocabulary)).unsqueeze(1)
        dropped |= ascending < ascending.gather(1, kth)
    if p is not None:
        survivors = ascending.masked_fill(dropped, -float("inf"))
        mass = survivors.softmax(dim=-1).cumsum(dim=-1)
        outside = mass <= 1 - p.unsqueeze(1)
        outside[:, -1] = False
        dropped |= outside
    logits.masked_fill_(torch.zeros_like(dropped).scatter_(1, order, dropped), -float("inf"))


def _min_p_samples(space: SampleSpace) -> Iterator[Sample]:
    for batch, vocabulary in ((1, 7), (5, 1000), (0, 4)):
        yield Sample(f"{(batch, vocabulary)}", (space.normal(batch, vocabulary) * 2, space.uniform(batch)))
    bounds = space.tensor([0.0, 1.0], torch.float32)
    yield Sample("bounds", (space.normal(2, 20), bounds))
    yield Sample("column", (space.normal(2, 20), bounds.unsqueeze(1)))


@operator(
    "(Tensor(a!) logits, Tensor min_p) -> ()",
    samples=_min_p_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def min_p_mask(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Sets the logits of tokens less likely than min_p times the likeliest to -inf; min_p is [batch] or [batch, 1]."""
    probabilities = logits.softmax(dim=-1)
    threshold = probabilities.amax(dim=-1, keepdim=True) * min_p.reshape(-1, 1)
    logits.masked_fill_(probabilities < threshold, -float("inf"))


def _occurrences(ids: torch.Tensor, batch: int, vocabulary: int) -> torch.Tensor:
    """Returns how often each token of the vocabulary occurs in each row; ids outside the vocabulary are padding."""
    inside = (ids >= 0) & (ids < vocabulary)
    columns = torch.where(inside, ids, vocabulary).long()
    counts = torch.zeros((batch, vocabulary + 1), dtype=torch.int64, device=ids.device)
    counts.scatter_add_(1, columns, torch.ones_like(columns))
    return counts[:, :vocabulary]


def _penalty_samples(space: SampleSpace) -> Iterator[Sample]:
    for batch, vocabulary, prompt, output in ((1, 10, 4, 3), (3, 100, 20, 9), (2, 10, 5, 0), (0, 10, 0, 0)):
        yield Sample(
            f"{batch} x {vocabulary}, {prompt} prompt and {output} output tokens",
            (
                space.normal(batch, vocabulary),
                space.integers(vocabulary + 1, batch, prompt),
                space.integers(vocabulary + 1, batch, output),
                space.uniform(batch),
                space.uniform(batch),
                space.uniform(batch) + 0.5,
            ),
        )
    zero, one = space.tensor([0.0], torch.float32), space.tensor([1.0], torch.float32)
    ids = space.integers(8, 1, 4)
    yield Sample("no effect", (space.normal(1, 8), ids, ids, zero, zero, one))


@operator(
    "(Tensor(a!) logits, Tensor prompt_ids, Tensor output_ids, Tensor presence, Tensor frequency,"
    " Tensor repetition) -> ()",
    samples=_penalty_samples,
    fake=nothing,
    dtypes=FLOAT32,
)
def apply_penalties(
    logits: torch.Tensor,
    prompt_ids: torch.Tensor,
    output_ids: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Applies the repetition penalty to tokens of prompt and output, then frequency and presence penalties to output.

    Ids are [batch, any length]; an id outside the vocabulary is padding. The repetition penalty lowers logits of
    either sign: positive ones are divided by it, the others multiplied.
    """
    batch, vocabulary = logits.shape
    written = _occurrences(output_ids, batch, vocabulary)
    seen = (_occurrences(prompt_ids, batch, vocabulary) > 0) | (written > 0)
    factor = torch.where(seen, repetition.unsqueeze(1), 1.0)
    logits.mul_(torch.where(logits > 0, 1.0 / factor, factor))
    logits.sub_(frequency.unsqueeze(1) * written)
    logits.sub_(presence.unsqueeze(1) * (written > 0))


def _race_samples(space: SampleSpace) -> Iterator[Sample]:
    for batch, vocabulary in ((1, 5), (4, 1000), (0, 8)):
        probabilities = space.normal(batch, vocabulary, dtype=torch.float32).softmax(-1)
        noise = -torch.log1p(-space.uniform(batch, vocabulary)) + 1e-6
        yield Sample(f"{(batch, vocabulary)}", (probabilities, noise))
        yield Sample(f"{(batch, vocabulary)}, double noise", (probabilities, noise.double()))


def _race_fake(probs: torch.Tensor, exponential_noise: torch.Tensor) -> torch.Tensor:
    return probs.new_empty(probs.shape[0], dtype=torch.int64)


@operator(
    "(Tensor probs, Tensor exponential_noise) -> Tensor",
    samples=_race_samples,
    fake=_race_fake,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def sample_by_race(probs: torch.Tensor, exponential_noise: torch.Tensor) -> torch.Tensor:
    """Draws a token from each row by the Gumbel-max trick (exponential race): the arg-max of probs / exponential noise.

    noise / probs[i] is an exponential time of rate probs[i], and token i has the shortest time with probability
    probs[i]. If the noise has a wider dtype, the division is computed in it.
    """
    if exponential_noise.dtype == probs.dtype:
        return (probs / exponential_noise).argmax(dim=-1)
    return (exponential_noise.reciprocal() * probs).argmax(dim=-1)
