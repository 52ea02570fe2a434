"""Tests that the tokens of the rejection sampler follow the target's distribution, whatever the draft tokens are.

The rejection sampler is vLLM's, as the runner uses it: with Backplane's operators for its kernels, and Backplane's
sampler for the bonus token. Three wrong samplers must fail the same bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_triton_replacements import metadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from tests.statistics_of_draws import UNLIKELY, p_value
from vllm_backplane import ops
from vllm_backplane.runner import triton_replacements
from vllm_backplane.runner.sampler import BackplaneSampler

CPU = torch.device("cpu")
REQUESTS, DRAFTS, VOCABULARY = 6_000, 2, 8
TEMPERATURE = 0.8


@pytest.fixture(autouse=True)
def _kernels_replaced() -> None:
    triton_replacements.register()


def logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits of the target at three positions, and of the drafter at two, where many draft tokens are
    rejected."""
    random = torch.Generator().manual_seed(5)
    target = torch.randn(DRAFTS + 1, VOCABULARY, generator=random)
    return target, target[:DRAFTS] + torch.randn(DRAFTS, VOCABULARY, generator=random)


def processed(target: torch.Tensor, top_k: int | None) -> torch.Tensor:
    """Returns the expected probabilities, computed independently of vLLM."""
    scaled = target / TEMPERATURE
    if top_k is not None:
        kept = scaled >= scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(~kept, float("-inf"))
    return scaled.softmax(-1)


def draw(certain: bool, top_k: int | None) -> torch.Tensor:
    """Returns the tokens of all requests, [REQUESTS, DRAFTS + 1], with -1 after a rejection."""
    torch.manual_seed(17)
    target, drafter = logits()
    if certain:  # as with n-grams: no probabilities, and always the same draft tokens
        draft_tokens, probabilities = drafter.argmax(-1).repeat(REQUESTS, 1), None
    else:
        shares = drafter.softmax(-1)
        draft_tokens = torch.stack([torch.multinomial(one, REQUESTS, replacement=True) for one in shares], dim=1)
        probabilities = shares.repeat(REQUESTS, 1)
    described = SpecDecodeMetadata.make_dummy(draft_tokens.tolist(), CPU)
    rows = torch.arange(REQUESTS * (DRAFTS + 1)).view(REQUESTS, DRAFTS + 1)
    described.target_logits_indices = rows[:, :DRAFTS].reshape(-1).int()
    described.bonus_logits_indices = rows[:, DRAFTS].int()
    changes: dict[str, Any] = {} if top_k is None else {"top_k": torch.full((REQUESTS,), top_k, dtype=torch.int32)}
    sampling = metadata([TEMPERATURE] * REQUESTS, **changes)
    sampler = RejectionSampler(BackplaneSampler())
    return sampler(described, probabilities, target.repeat(REQUESTS, 1), sampling).sampled_token_ids


def fits(drawn: torch.Tensor, top_k: int | None) -> list[float]:
    """Returns the p-value at each position, over the requests that reached it. Logits do not depend on earlier tokens
    here."""
    target = processed(logits()[0], top_k).double()
    found = []
    for place in range(DRAFTS + 1):
        there = drawn[drawn[:, place] >= 0]
        counts = torch.bincount(there[:, place].long(), minlength=VOCABULARY)
        found.append(p_value(counts.tolist(), target[place].tolist()))
    return found


WAYS = pytest.mark.parametrize(
    ("certain", "top_k"),
    [(False, None), (True, None), (False, 4), (True, 4)],
    ids=["drawn", "certain", "drawn, top 4", "certain, top 4"],
)


@WAYS
def test_tokens_follow_the_target(certain: bool, top_k: int | None) -> None:
    drawn = draw(certain, top_k)
    reached = [(drawn[:, place] >= 0).sum().item() for place in range(DRAFTS + 1)]
    assert reached[0] == REQUESTS
    assert REQUESTS > reached[1] > reached[2] > 100, "some drafts must be accepted, and some not"
    assert min(fits(drawn, top_k)) > UNLIKELY


def everything_accepted(right: Callable[..., None]) -> Callable[..., None]:
    def wrong(output: Any, ends: Any, drafts: Any, draft_probs: Any, target_probs: Any, *rest: Any) -> None:
        right(output, ends, drafts, None, torch.ones_like(target_probs), *rest)

    return wrong


def recovered_from_the_target(right: Callable[..., None]) -> Callable[..., None]:
    """Samples from the target's distribution, instead of its remainder after the draft token."""

    def wrong(output: Any, ends: Any, drafts: Any, draft_probs: Any, target_probs: Any, noise: Any) -> None:
        right(output, ends, torch.full_like(drafts, -1), None, target_probs, noise)

    return wrong


def accepted_by_the_target_alone(right: Callable[..., None]) -> Callable[..., None]:
    """Accepts without dividing by the draft token's probability."""

    def wrong(output: Any, ends: Any, drafts: Any, draft_probs: Any, target_probs: Any, *rest: Any) -> None:
        right(output, ends, drafts, None, target_probs, *rest)

    return wrong


@pytest.mark.parametrize(
    ("operator", "mistake", "certain"),
    [
        ("rejection_random_sample", everything_accepted, False),
        ("rejection_random_sample", everything_accepted, True),
        ("sample_recovered_tokens", recovered_from_the_target, False),
        ("sample_recovered_tokens", recovered_from_the_target, True),
        ("rejection_random_sample", accepted_by_the_target_alone, False),
    ],
)
def test_a_wrong_sampler_is_found(
    monkeypatch: pytest.MonkeyPatch, operator: str, mistake: Callable[..., Callable[..., None]], certain: bool
) -> None:
    monkeypatch.setattr(ops, operator, mistake(getattr(ops, operator)))
    assert min(fits(draw(certain, None), None)) < UNLIKELY


def test_the_drafters_own_distribution_does_not_fit() -> None:
    """Otherwise the bound could not distinguish the two distributions."""
    _, drafter = logits()
    counts = torch.bincount(draw(False, None)[:, 0].long(), minlength=VOCABULARY)
    assert p_value(counts.tolist(), drafter[0].softmax(-1).tolist()) < UNLIKELY
