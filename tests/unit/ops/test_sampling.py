"""Tests the sampling operators against their definitions, written with Python loops and numpy float64."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from vllm_backplane import ops

INF = float("inf")


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [{i for i, value in enumerate(row) if value != -INF} for row in logits.tolist()]


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) for value in row]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0.0, 2.0, 1.0]], [1]),
        ([[3.0, 3.0, 1.0], [1.0, 2.0, 2.0]], [0, 1]),
        ([[-INF, -INF, -5.0]], [2]),
        ([[7.0]], [0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_first_maximum(rows: list[list[float]], expected: list[int], dtype: torch.dtype) -> None:
    chosen = ops.greedy_argmax(torch.tensor(rows, dtype=dtype))
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == expected


def test_greedy_of_an_empty_batch() -> None:
    assert ops.greedy_argmax(torch.empty(0, 5)).shape == (0,)


def expected_top_k_top_p(row: list[float], k: int | None, p: float | None) -> set[int]:
    """Returns the masked logits by the definition of top-k and top-p, for rows without equal values."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    chosen = [i for i in order if row[i] > -INF] if k is None else order[:k]
    if p is None:
        return {i for i in chosen if row[i] > -INF}
    probabilities = softmax([row[i] for i in chosen])
    result: set[int] = set()
    # From the likeliest down: a token stays while it and all less likely ones together outweigh 1 - p.
    for place, index in enumerate(chosen):
        if place == 0 or sum(probabilities[place:]) > 1 - p:
            result.add(index)
    return {i for i in result if row[i] > -INF}


@pytest.mark.parametrize("use_k", [False, True])
@pytest.mark.parametrize("use_p", [False, True])
def test_top_k_and_top_p(use_k: bool, use_p: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 31, generator=generator) * 2
    k = torch.randint(1, 32, (40,), generator=generator, dtype=torch.int32)
    p = torch.rand(40, generator=generator) * 0.98 + 0.01
    before = logits.clone()
    ops.top_k_top_p_mask(logits, k if use_k else None, p if use_p else None)
    for row, got, one_k, one_p in zip(before.tolist(), kept(logits), k.tolist(), p.tolist(), strict=True):
        assert got == expected_top_k_top_p(row, one_k if use_k else None, one_p if use_p else None)
    survivors = logits != -INF
    assert torch.equal(logits[survivors], before[survivors])


def test_k_of_the_vocabulary_and_p_of_one_change_nothing() -> None:
    logits = torch.randn(3, 17)
    before = logits.clone()
    ops.top_k_top_p_mask(logits, torch.full((3,), 17, dtype=torch.int32), torch.ones(3))
    assert torch.equal(logits, before)


def test_everything_equal_to_the_kth_stays() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 2.0, 2.0, 0.0]])
    ops.top_k_top_p_mask(logits, torch.tensor([2], dtype=torch.int32), None)
    assert kept(logits) == [{1, 2, 3, 4}]


def test_a_tiny_p_keeps_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 4.0, 1.0], [9.0, 0.0, 8.0]])
    ops.top_k_top_p_mask(logits, None, torch.tensor([1e-9, 1e-9]))
    assert kept(logits) == [{1}, {0}]


def test_banned_tokens_stay_banned() -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, 0.0]])
    ops.top_k_top_p_mask(logits, torch.tensor([3], dtype=torch.int32), torch.tensor([0.999]))
    assert kept(logits) == [{1, 3}]


def test_mask_of_an_empty_batch() -> None:
    logits = torch.empty(0, 5)
    ops.top_k_top_p_mask(logits, torch.empty(0, dtype=torch.int32), torch.empty(0))
    ops.min_p_mask(logits, torch.empty(0))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_min_p(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(20, 30, generator=generator)
    min_p = torch.rand(20, generator=generator)
    min_p[0] = 0.0
    rows = logits.tolist()
    ops.min_p_mask(logits, min_p.view(shape))
    for row, got, threshold in zip(rows, kept(logits), min_p.tolist(), strict=True):
        probabilities = softmax(row)
        assert got == {i for i, q in enumerate(probabilities) if q >= threshold * max(probabilities)}


def test_penalties() -> None:
    generator = torch.Generator().manual_seed(3)
    batch, vocabulary = 5, 12
    logits = torch.randn(batch, vocabulary, generator=generator)
    prompt = torch.randint(0, vocabulary + 1, (batch, 6), generator=generator)
    output = torch.randint(-1, vocabulary + 1, (batch, 9), generator=generator)
    presence, frequency = torch.rand(2, batch, generator=generator).unbind()
    repetition = torch.rand(batch, generator=generator) + 0.5
    expected = logits.double().numpy().copy()
    for row in range(batch):
        in_prompt = set(prompt[row].tolist())
        written = Counter(output[row].tolist())
        for token in range(vocabulary):
            value = expected[row, token]
            if token in in_prompt or token in written:
                factor = float(repetition[row])
                value = value / factor if value > 0 else value * factor
            if token in written:
                value -= float(frequency[row]) * written[token] + float(presence[row])
            expected[row, token] = value
    ops.apply_penalties(logits, prompt, output, presence, frequency, repetition)
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_penalties_keep_banned_tokens_banned() -> None:
    logits = torch.tensor([[-INF, 1.0]])
    ids = torch.tensor([[0, 0]])
    one = torch.ones(1)
    ops.apply_penalties(logits, ids, ids, one, one, one * 2)
    assert logits.tolist() == [[-INF, 1.0]]


def test_penalties_without_output_tokens() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0]])
    empty = torch.empty(1, 0, dtype=torch.int64)
    ops.apply_penalties(logits, torch.tensor([[0, 1]]), empty, torch.ones(1), torch.ones(1), torch.full((1,), 2.0))
    assert logits.tolist() == [[1.0, -4.0, 2.0]]


@pytest.mark.parametrize("noise_type", [torch.float32, torch.float64])
def test_race_goes_to_the_earliest_ring(noise_type: torch.dtype) -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    noise = torch.tensor([[2.0, 0.4, 3.0], [9.0, 0.01, 0.01]], dtype=noise_type)
    times = noise.double().numpy() / np.maximum(probs.double().numpy(), 1e-300)
    assert ops.sample_by_race(probs, noise).tolist() == times.argmin(axis=1).tolist()
    assert torch.equal(probs, torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]))


def test_race_draws_with_the_given_probabilities() -> None:
    wanted = torch.tensor([0.6, 0.25, 0.1, 0.05])
    draws = 40_000
    noise = torch.empty(draws, 4).exponential_(generator=torch.Generator().manual_seed(4))
    drawn = ops.sample_by_race(wanted.repeat(draws, 1), noise)
    counts = torch.bincount(drawn, minlength=4) / draws
    # The bound is four standard deviations of the most frequent token's share.
    assert torch.allclose(counts, wanted, atol=4 * math.sqrt(0.24 / draws))


def test_race_of_an_empty_batch() -> None:
    assert ops.sample_by_race(torch.empty(0, 3), torch.empty(0, 3)).shape == (0,)
