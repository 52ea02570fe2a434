"""Declares the operators of rejection sampling, which accept or reject draft tokens against the target model.

The draft tokens of all requests are concatenated; `cu_num_draft_tokens` [requests] has the end of each
request's draft tokens. vLLM's kernels count elements, so callers may pass values per draft token or per request,
but not those ends, as a vector or as a matrix of one column. Outputs are [requests, most draft tokens + 1],
filled with a placeholder before the call: a request's row receives the accepted draft tokens, then either the
target's own token at the first rejection or, if all are accepted, the bonus token. A draft token of -1 is
padding and always rejected.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.operator import FLOAT32, FLOAT32_EXACT, Sample, SampleSpace, nothing, operator
from vllm_backplane.ops.slot_mapping import request_of_token


class _Rows:
    """Views ragged draft tokens as [requests, most draft tokens + 1]; values past a request's own are arbitrary."""

    def __init__(self, output: torch.Tensor, cu_num_draft_tokens: torch.Tensor, num_drafts: int) -> None:
        ends = cu_num_draft_tokens.to(torch.int64)
        counts = torch.diff(ends, prepend=torch.zeros_like(ends[:1])).unsqueeze(1)
        self.column = torch.arange(output.shape[1], device=output.device).unsqueeze(0)
        self.token = (ends.unsqueeze(1) - counts + self.column).clamp(max=max(num_drafts - 1, 0))
        self.is_draft = self.column < counts
        self.is_bonus = self.column == counts

    def __call__(self, per_token: torch.Tensor) -> torch.Tensor:
        if per_token.shape[0] == 0:
            return per_token.new_zeros(self.token.shape)
        return per_token.reshape(-1)[self.token]


def _write(
    output: torch.Tensor,
    rows: _Rows,
    accepted: torch.Tensor,
    tokens: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    chosen: torch.Tensor | None,
) -> None:
    """Writes `tokens` up to and including the first that is not accepted, or all of them and the bonus token."""
    before = torch.ones_like(accepted)
    before[:, 1:] = accepted[:, :-1]
    reached = before.to(torch.int32).cumprod(dim=1).bool() & (rows.is_draft | rows.is_bonus)
    if chosen is not None:
        reached &= chosen.reshape(-1, 1)
    bonus = bonus_token_ids.reshape(-1, 1).to(output.dtype)
    values = torch.where(rows.is_bonus, bonus, tokens.to(output.dtype))
    output.copy_(torch.where(reached, values, output))


def _synthetic(rows: _Rows, drafts: torch.Tensor, uniform: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """Accepts by a fixed rate per position in the draft, independently of the models, for benchmarks only."""
    rate = rates[rows.column.clamp(max=rates.shape[0] - 1)]
    return (rows(uniform) < rate) & (drafts >= 0)


def _cases(space: SampleSpace) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, int]]:
    """Yields (label, output to fill, ends of the requests' draft tokens, number of draft tokens)."""
    for label, counts in (
        ("mixed", [3, 1, 2, 3]),
        ("requests without drafts", [0, 2, 0]),
        ("no drafts", [0, 0]),
        ("no request", []),
    ):
        output = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
        ends = torch.tensor(counts, dtype=torch.int64).cumsum(0).to(torch.int32)
        yield label, output.to(space.device), ends.to(space.device), sum(counts)


def _greedy_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, output, ends, total in _cases(space):
        requests = ends.shape[0]
        drafts, target = space.integers(2, total, dtype=torch.int32), space.integers(2, total)
        bonus = space.integers(9, requests, 1, dtype=torch.int32)
        yield Sample(f"{label}, all greedy", (output, ends, drafts, target, bonus, None))
        greedy = space.integers(2, requests).bool()
        yield Sample(f"{label}, some greedy", (output.clone(), ends, drafts, target, bonus, greedy))
        columns = (drafts.unsqueeze(1), target.unsqueeze(1), bonus.squeeze(1), greedy.unsqueeze(1))
        yield Sample(f"{label}, columns", (output.clone(), ends, *columns))
        uniform = space.uniform(total, dtype=torch.float64)
        rates = space.tensor([0.9, 0.6, 0.3], torch.float32)
        synthetic = (output.clone(), ends, drafts, target, bonus, greedy, uniform, rates)
        yield Sample(f"{label}, synthetic", synthetic)


@operator(
    "(Tensor(a!) output_token_ids, Tensor cu_num_draft_tokens, Tensor draft_token_ids, Tensor target_argmax,"
    " Tensor bonus_token_ids, Tensor? is_greedy, Tensor? uniform_probs=None, Tensor? synthetic_rates=None)"
    " -> ()",
    samples=_greedy_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def rejection_greedy_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    uniform_probs: torch.Tensor | None = None,
    synthetic_rates: torch.Tensor | None = None,
) -> None:
    """Accepts draft tokens while they are the target's argmax; writes the rows of greedy requests (None: all)."""
    rows = _Rows(output_token_ids, cu_num_draft_tokens, draft_token_ids.shape[0])
    drafts, target = rows(draft_token_ids), rows(target_argmax)
    if synthetic_rates is None:
        accepted, tokens = drafts == target, target
    else:
        if uniform_probs is None:
            raise OperatorError("rejection_greedy_sample: synthetic_rates were given without uniform_probs")
        accepted = _synthetic(rows, drafts, uniform_probs, synthetic_rates)
        tokens = torch.where(accepted, drafts.to(target.dtype), target)
    _write(output_token_ids, rows, accepted, tokens, bonus_token_ids, is_greedy)


def _random_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, output, ends, total in _cases(space):
        requests, vocabulary = ends.shape[0], 11
        drafts = space.integers(vocabulary, total, low=-1, dtype=torch.int32)
        draft_probs = space.normal(total, vocabulary, dtype=torch.float32).softmax(-1)
        target_probs = space.normal(total, vocabulary, dtype=torch.float32).softmax(-1)
        bonus = space.integers(9, requests, 1, dtype=torch.int32)
        recovered = space.integers(vocabulary, total, dtype=torch.int32)
        uniform = space.uniform(total, dtype=torch.float64)
        greedy = space.integers(2, requests).bool()
        rest = (target_probs, bonus, recovered, uniform)
        yield Sample(label, (output, ends, drafts, draft_probs, *rest, greedy))
        none = torch.zeros_like(greedy)
        yield Sample(f"{label}, no draft probabilities", (output.clone(), ends, drafts, None, *rest, none))
        columns = (bonus.squeeze(1), recovered.unsqueeze(1), uniform.unsqueeze(1), greedy.unsqueeze(1))
        arguments = (output.clone(), ends, drafts.unsqueeze(1), draft_probs, target_probs, *columns)
        yield Sample(f"{label}, columns", arguments)
        rates = space.tensor([0.9, 0.6, 0.3], torch.float32)
        synthetic = (output.clone(), ends, drafts, draft_probs, *rest, greedy, rates)
        yield Sample(f"{label}, synthetic", synthetic)


@operator(
    "(Tensor(a!) output_token_ids, Tensor cu_num_draft_tokens, Tensor draft_token_ids, Tensor? draft_probs,"
    " Tensor target_probs, Tensor bonus_token_ids, Tensor recovered_token_ids, Tensor uniform_probs,"
    " Tensor is_greedy, Tensor? synthetic_rates=None) -> ()",
    samples=_random_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def rejection_random_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    synthetic_rates: torch.Tensor | None = None,
) -> None:
    """Accepts a draft token with probability target / draft; writes the rows of requests that are not greedy.

    Without draft probabilities, a draft token has probability 1. A draft token of probability 0 is rejected.
    The token at the first rejection is the recovered one.
    """
    rows = _Rows(output_token_ids, cu_num_draft_tokens, draft_token_ids.shape[0])
    drafts = rows(draft_token_ids)
    if synthetic_rates is not None:
        accepted = _synthetic(rows, drafts, uniform_probs, synthetic_rates)
    else:
        draft_token_ids = draft_token_ids.reshape(-1)
        vocabulary_index = draft_token_ids.clamp(min=0).to(torch.int64).unsqueeze(1)
        ratio = target_probs.gather(1, vocabulary_index).squeeze(1)
        possible = draft_token_ids >= 0
        if draft_probs is not None:
            proposed = draft_probs.gather(1, vocabulary_index).squeeze(1)
            possible &= proposed > 0
            ratio = ratio / proposed
        accepted = rows(possible & (ratio >= uniform_probs.reshape(-1)))
    tokens = torch.where(accepted, drafts, rows(recovered_token_ids).to(drafts.dtype))
    _write(output_token_ids, rows, accepted, tokens, bonus_token_ids, ~is_greedy)


def _expand_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, _, ends, total in _cases(space):
        requests = ends.shape[0]
        output = torch.full((total,), 7.0).to(space.device)
        yield Sample(f"{label}, temperatures", (output, space.integers(2, requests).float(), ends, 0, 1))
        yield Sample(f"{label}, integers", (output.int(), space.integers(9, requests).int(), ends, 0, 0))


@operator(
    "(Tensor(a!) output, Tensor values, Tensor cu_num_tokens, Scalar replace_from, Scalar replace_to) -> ()",
    samples=_expand_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def expand_to_tokens(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
) -> None:
    """Expands each request's value to its tokens; a value equal to replace_from becomes replace_to."""
    if values.shape[0] == 0:
        return
    replaced = values.masked_fill(values == replace_from, replace_to).to(output.dtype)
    request = request_of_token(cu_num_tokens, output.shape[0])
    last = values.shape[0] - 1
    output.copy_(torch.where(request <= last, replaced[request.clamp(max=last)], output))


def _recovered_samples(space: SampleSpace) -> Iterator[Sample]:
    for label, _, ends, total in _cases(space):
        requests, vocabulary = ends.shape[0], 17
        drafts = space.integers(vocabulary, total, low=-1, dtype=torch.int32)
        draft_probs = space.normal(total, vocabulary, dtype=torch.float32).softmax(-1)
        target_probs = space.normal(total, vocabulary, dtype=torch.float32).softmax(-1)
        speed = space.uniform(requests, vocabulary) + 0.1
        output = torch.full_like(drafts, 7)
        yield Sample(label, (output, ends, drafts, draft_probs, target_probs, speed))
        without = (output.clone(), ends, drafts, None, target_probs, speed.double())
        yield Sample(f"{label}, no draft probabilities", without)
        columns = (output.clone().unsqueeze(1), ends, drafts.unsqueeze(1))
        yield Sample(f"{label}, columns", (*columns, draft_probs, target_probs, speed))
        yield Sample(f"{label}, columns, no draft probabilities", (*columns, None, target_probs, speed))


@operator(
    "(Tensor(a!) output_token_ids, Tensor cu_num_draft_tokens, Tensor draft_token_ids, Tensor? draft_probs,"
    " Tensor target_probs, Tensor inverse_noise) -> ()",
    samples=_recovered_samples,
    fake=nothing,
    dtypes=FLOAT32,
    tolerances=FLOAT32_EXACT,
)
def sample_recovered_tokens(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inverse_noise: torch.Tensor,
) -> None:
    """Draws the token that replaces each draft token if it is rejected, from max(target - draft, 0).

    It draws by the exponential race of sample_by_race, with one row of inverted noise per request, [requests,
    vocabulary]. Without draft probabilities, the draft token has probability 1, so the draw is from the target
    without that token.
    """
    requests = cu_num_draft_tokens.shape[0]
    if requests == 0 or draft_token_ids.shape[0] == 0:
        return
    request = request_of_token(cu_num_draft_tokens, draft_token_ids.shape[0])
    owned = request < requests
    if draft_probs is None:
        vocabulary = torch.arange(target_probs.shape[1], device=target_probs.device)
        weight = torch.where(vocabulary == draft_token_ids.reshape(-1, 1), 0.0, target_probs)
    else:
        weight = (target_probs - draft_probs).clamp(min=0.0)
    winner = (weight * inverse_noise[request.clamp(max=requests - 1)]).argmax(dim=1)
    drawn = torch.where(owned, winner.to(output_token_ids.dtype), output_token_ids.reshape(-1))
    output_token_ids.copy_(drawn.view(output_token_ids.shape))
