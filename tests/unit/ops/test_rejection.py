"""Tests rejection sampling against the algorithm, applied to one request and one draft token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_backplane import ops
from vllm_backplane.errors import OperatorError

EMPTY = -1


def ends(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int64).cumsum(0).to(torch.int32)


def fresh(counts: list[int]) -> torch.Tensor:
    return torch.full((len(counts), max(counts, default=0) + 1), EMPTY, dtype=torch.int32)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def greedy(counts: list[int], drafts: list[int], target: list[int], bonus: list[int], is_greedy=None) -> list:
    out = fresh(counts)
    ops.rejection_greedy_sample(
        out,
        ends(counts),
        ints(drafts),
        torch.tensor(target, dtype=torch.int64),
        ints(bonus).view(-1, 1),
        is_greedy,
    )
    return out.tolist()


def test_greedy_all_accepted_appends_the_bonus() -> None:
    assert greedy([2, 1], [5, 6, 7], [5, 6, 7], [8, 9]) == [[5, 6, 8], [7, 9, EMPTY]]


def test_greedy_all_rejected_keeps_the_first_target() -> None:
    assert greedy([2, 1], [5, 6, 7], [1, 2, 3], [8, 9]) == [[1, EMPTY, EMPTY], [3, EMPTY, EMPTY]]


def test_greedy_stops_at_the_first_rejection() -> None:
    # The third draft token agrees again, but it follows a rejection and does not count.
    assert greedy([3], [5, 6, 7], [5, 1, 7], [8]) == [[5, 1, EMPTY, EMPTY]]


def test_greedy_padding_is_rejected() -> None:
    assert greedy([2], [5, -1], [5, 4], [8]) == [[5, 4, EMPTY]]


def test_greedy_without_drafts_gives_the_bonus() -> None:
    assert greedy([0, 0], [], [], [8, 9]) == [[8], [9]]
    assert greedy([0, 2, 0], [5, 6], [5, 1], [7, 8, 9]) == [
        [7, EMPTY, EMPTY],
        [5, 1, EMPTY],
        [9, EMPTY, EMPTY],
    ]


def test_greedy_without_requests() -> None:
    assert greedy([], [], [], []) == []


def test_greedy_leaves_other_rows_alone() -> None:
    rows = greedy([1, 1], [5, 6], [5, 6], [8, 9], torch.tensor([False, True]))
    assert rows == [[EMPTY, EMPTY], [6, 9]]


def test_greedy_synthetic_needs_numbers() -> None:
    with pytest.raises(OperatorError, match="uniform_probs"):
        ops.rejection_greedy_sample(
            fresh([1]), ends([1]), ints([1]), ints([1]), ints([1]), None, None, torch.tensor([0.5])
        )


def expected_random(
    counts: list[int],
    drafts: list[int],
    draft_probs: np.ndarray | None,
    target_probs: np.ndarray,
    bonus: list[int],
    recovered: list[int],
    uniform: list[float],
    is_greedy: list[bool],
    rates: list[float] | None = None,
) -> list[list[int]]:
    width = max(counts, default=0) + 1
    rows, at = [], 0
    for request, count in enumerate(counts):
        row: list[int] = []
        if not is_greedy[request]:
            for place in range(count):
                token, number = drafts[at + place], uniform[at + place]
                if token < 0:
                    accepted = False
                elif rates is not None:
                    accepted = number < np.float32(rates[place])
                else:
                    proposed = 1.0 if draft_probs is None else draft_probs[at + place, token]
                    accepted = proposed > 0 and target_probs[at + place, token] / proposed >= number
                row.append(token if accepted else recovered[at + place])
                if not accepted:
                    break
            else:
                row.append(bonus[request])
        rows.append(row + [EMPTY] * (width - len(row)))
        at += count
    return rows


@pytest.mark.parametrize("mode", ["draft probabilities", "certain drafts", "synthetic"])
@pytest.mark.parametrize("counts", [[3, 0, 1, 4, 2], [0, 0], [], [5]], ids=str)
def test_random(mode: str, counts: list[int]) -> None:
    random = np.random.default_rng(7)
    for _ in range(20):
        total, vocabulary = sum(counts), 6
        drafts = random.integers(-1, vocabulary, total).tolist()
        target = random.dirichlet(np.ones(vocabulary), total).astype(np.float32).reshape(total, vocabulary)
        proposed = random.dirichlet(np.ones(vocabulary), total).astype(np.float32).reshape(total, vocabulary)
        proposed[random.random(proposed.shape) < 0.2] = 0.0
        bonus = random.integers(0, vocabulary, len(counts)).tolist()
        recovered = random.integers(0, vocabulary, total).tolist()
        uniform = random.random(total).tolist()
        is_greedy = (random.random(len(counts)) < 0.3).tolist()
        rates = [0.9, 0.7, 0.5, 0.3, 0.1] if mode == "synthetic" else None
        draft_probs = None if mode == "certain drafts" else proposed
        out = fresh(counts)
        ops.rejection_random_sample(
            out,
            ends(counts),
            ints(drafts),
            None if draft_probs is None else torch.from_numpy(draft_probs),
            torch.from_numpy(target),
            ints(bonus).view(-1, 1),
            ints(recovered),
            torch.tensor(uniform, dtype=torch.float64),
            torch.tensor(is_greedy, dtype=torch.bool),
            None if rates is None else torch.tensor(rates),
        )
        wanted = expected_random(counts, drafts, draft_probs, target, bonus, recovered, uniform, is_greedy, rates)
        assert out.tolist() == wanted


def test_the_output_follows_the_target_distribution() -> None:
    """Checks the theorem of speculative decoding: for any draft, the first token has the target's distribution."""
    generator = torch.Generator().manual_seed(11)
    trials = 40_000
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])
    drafts = torch.multinomial(draft, trials, replacement=True, generator=generator).int()
    counts = [1] * trials
    noise = torch.empty(trials, 3).exponential_(generator=generator)
    recovered = torch.empty(trials, dtype=torch.int32)
    target_probs, draft_probs = target.repeat(trials, 1), draft.repeat(trials, 1)
    ops.sample_recovered_tokens(recovered, ends(counts), drafts, draft_probs, target_probs, noise.reciprocal())
    out = fresh(counts)
    uniform = torch.rand(trials, dtype=torch.float64, generator=generator)
    bonus, not_greedy = torch.zeros(trials, 1, dtype=torch.int32), torch.zeros(trials, dtype=torch.bool)
    ops.rejection_random_sample(
        out, ends(counts), drafts, draft_probs, target_probs, bonus, recovered, uniform, not_greedy
    )
    shares = torch.bincount(out[:, 0].long(), minlength=3) / trials
    assert torch.allclose(shares, target, atol=4 * math.sqrt(0.25 / trials))


def test_expand_repeats_and_replaces() -> None:
    out = torch.full((6,), 7.0)
    ops.expand_to_tokens(out, torch.tensor([0.5, 0.0, 2.0]), ends([2, 3, 1]), 0, 1)
    assert out.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 2.0]


def test_expand_of_integers_past_float_precision() -> None:
    out = torch.zeros(3, dtype=torch.int32)
    big = 2**24 + 1
    ops.expand_to_tokens(out, ints([big, 0]), ends([2, 1]), 0, 0)
    assert out.tolist() == [big, big, 0]


def test_expand_skips_requests_without_tokens_and_keeps_the_rest() -> None:
    out = torch.full((4,), 7.0)
    ops.expand_to_tokens(out, torch.tensor([1.0, 2.0, 3.0]), ends([0, 2, 0]), 9, 9)
    assert out.tolist() == [2.0, 2.0, 7.0, 7.0]
    ops.expand_to_tokens(out, torch.empty(0), ends([]), 0, 1)
    assert out.tolist() == [2.0, 2.0, 7.0, 7.0]


@pytest.mark.parametrize("with_draft_probs", [True, False])
@pytest.mark.parametrize("noise_type", [torch.float32, torch.float64])
def test_recovered_tokens(with_draft_probs: bool, noise_type: torch.dtype) -> None:
    random = np.random.default_rng(3)
    counts, vocabulary = [2, 0, 3, 1], 9
    total = sum(counts)
    target = random.dirichlet(np.ones(vocabulary), total).astype(np.float32)
    proposed = random.dirichlet(np.ones(vocabulary), total).astype(np.float32)
    drafts = random.integers(-1, vocabulary, total).tolist()
    inverse = 1 / random.exponential(size=(len(counts), vocabulary))
    request = [r for r, count in enumerate(counts) for _ in range(count)]
    wanted = []
    for token in range(total):
        best, winner = -1.0, 0
        for candidate in range(vocabulary):
            if with_draft_probs:
                weight = max(float(target[token, candidate]) - float(proposed[token, candidate]), 0.0)
            else:
                weight = 0.0 if candidate == drafts[token] else float(target[token, candidate])
            score = weight * inverse[request[token], candidate]
            if score > best:
                best, winner = score, candidate
        wanted.append(winner)
    out = torch.full((total,), 77, dtype=torch.int32)
    ops.sample_recovered_tokens(
        out,
        ends(counts),
        ints(drafts),
        torch.from_numpy(proposed) if with_draft_probs else None,
        torch.from_numpy(target),
        torch.from_numpy(inverse).to(noise_type),
    )
    assert out.tolist() == wanted


def test_recovered_tokens_where_nothing_is_left_stay_in_the_vocabulary() -> None:
    same = torch.tensor([[0.5, 0.5]])
    out = torch.full((1,), 77, dtype=torch.int32)
    ops.sample_recovered_tokens(out, ends([1]), ints([0]), same, same.clone(), torch.ones(1, 2))
    assert out.tolist() == [0]


def test_recovered_tokens_without_drafts() -> None:
    out = torch.empty(0, dtype=torch.int32)
    ops.sample_recovered_tokens(out, ends([0, 0]), ints([]), None, torch.empty(0, 4), torch.ones(2, 4))
    assert out.shape == (0,)
