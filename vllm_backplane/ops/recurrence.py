"""Declares the operators of recurrent layers: the causal convolution, Mamba's scan and the gated delta rule.

The tokens of a batch are concatenated; row r has those from `query_start_loc[r]` to `query_start_loc[r + 1]`, and its
state is in slot `state_indices[r]` of a cache whose first dimension is the slot. A row whose context, `seq_lens[r]`, is
no longer than its tokens starts a sequence: the state that an earlier request left in its slot is not read. A row
without tokens is padding and may have any slot; slot 0 belongs to no request.

The references loop over the steps of the longest row, all rows at once, and read no value on the host. So they can be
queued, and a decode step, whose longest row is one token, can be captured into a graph. Sums are in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm_backplane.ops.operator import Sample, SampleSpace, Tolerance, operator

_TOLERANCES = {
    torch.float32: Tolerance(1e-4, 1e-4),
    torch.float16: Tolerance(5e-3, 5e-3),
    torch.bfloat16: Tolerance(2e-2, 2e-2),
}


class _Rows(NamedTuple):
    """Describes the rows of a batch; the fields are [rows], except for `row` and `offset`, which are [tokens]."""

    starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    resumed: torch.Tensor
    """Whether a row continues from the state in its slot."""
    row: torch.Tensor
    """The row of each token."""
    offset: torch.Tensor
    """The index of each token in its row."""

    @classmethod
    def of(
        cls, tokens: int, state_indices: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
    ) -> _Rows:
        starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
        lengths = ends - starts
        positions = torch.arange(tokens, device=starts.device)
        # Tokens past the last row are padding; their results are not used.
        row = (positions[:, None] >= ends[None]).sum(1).clamp(max=max(starts.shape[0] - 1, 0))
        return cls(
            starts,
            lengths,
            torch.where(lengths > 0, state_indices.long(), 0).clamp(min=0),
            seq_lens.long() > lengths,
            row,
            positions - starts.index_select(0, row),
        )

    def load(self, state: torch.Tensor) -> torch.Tensor:
        """Returns the rows' states in float32; zero for a row that starts a sequence."""
        held = state.index_select(0, self.slots).float()
        return torch.where(self.resumed.view(-1, *[1] * (held.dim() - 1)), held, torch.zeros_like(held))

    def store(self, new: torch.Tensor, state: torch.Tensor) -> None:
        """Writes the rows' new states into their slots."""
        state.index_copy_(0, self.slots, new.to(state.dtype))

    def at(self, step: int, values: torch.Tensor) -> torch.Tensor:
        """Returns the rows' values at one step, in float32; for a row that has ended, those of an arbitrary token."""
        return values.index_select(0, (self.starts + step).clamp(max=values.shape[0] - 1)).float()

    def update(self, step: int, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Returns the new state of rows that have a token at this step, and the old state of the others."""
        return torch.where((self.lengths > step).view(-1, *[1] * (new.dim() - 1)), new, old)

    def by_token(self, steps: list[torch.Tensor]) -> torch.Tensor:
        """Returns the results of all steps, [rows] each, in the order of the tokens."""
        joined = torch.stack(steps).flatten(0, 1)
        offset = self.offset.clamp(min=0, max=len(steps) - 1)
        return joined.index_select(0, offset * self.starts.shape[0] + self.row)


class _Batch(NamedTuple):
    """Describes the rows of a sample: the number of tokens of each, and of tokens before them."""

    label: str
    lengths: list[int]
    before: list[int]
    padding: int = 0
    """Number of tokens that belong to no row."""


_BATCHES = (
    _Batch("one prompt", [7], [0]),
    _Batch("decode", [1, 1, 1], [4, 9, 1]),
    _Batch("chunked prefill", [5], [3]),
    _Batch("mixed", [1, 6, 2, 1], [8, 0, 5, 0]),
    _Batch("a row of padding", [1, 1, 0], [4, 2, 0], padding=1),
)


def _metadata(space: SampleSpace, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (state_indices, query_start_loc, seq_lens); slots are not in the order of rows."""
    rows = len(batch.lengths)
    starts = [sum(batch.lengths[:row]) for row in range(rows + 1)]
    slots = [rows - row if batch.lengths[row] else 0 for row in range(rows)]
    lengths = [new + old for new, old in zip(batch.lengths, batch.before, strict=True)]
    return (
        space.tensor(slots, torch.int32),
        space.tensor(starts, torch.int32),
        space.tensor(lengths, torch.int32),
    )


def _sizes(batch: _Batch) -> tuple[int, int]:
    """Returns the number of tokens, and of slots of the cache."""
    return sum(batch.lengths) + batch.padding, len(batch.lengths) + 2


def _conv_samples(space: SampleSpace) -> Iterator[Sample]:
    for batch in _BATCHES:
        tokens, slots = _sizes(batch)
        for width, bias, silu in ((4, True, True), (2, False, False)):
            state = space.normal(slots, width - 1, 6).transpose(1, 2)
            x, weight = space.normal(tokens, 6), space.normal(6, width)
            yield Sample(
                f"{batch.label}, width {width}",
                (x, weight, space.normal(6) if bias else None, state, *_metadata(space, batch), silu),
            )


def _like(x: torch.Tensor, *_args: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor state_indices, Tensor query_start_loc,"
    " Tensor seq_lens, bool silu) -> Tensor",
    samples=_conv_samples,
    fake=_like,
    tolerances=_TOLERANCES,
)
def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """Returns a depthwise causal convolution over the tokens of each row, followed by SiLU if requested.

    x [tokens, channels]; weight [channels, width], the current token's last; state [slots, channels, at least
    width - 1] has the previous values, oldest first, and is updated.
    """
    past = weight.shape[1] - 1
    rows = _Rows.of(x.shape[0], state_indices, query_start_loc, seq_lens)
    state = state[:, :, :past]
    before = rows.load(state)
    wide, positions = x.float(), torch.arange(x.shape[0], device=x.device)
    result = torch.zeros_like(wide) if bias is None else bias.float().expand_as(wide)
    of_token = before.index_select(0, rows.row)
    for back in range(past + 1):
        value = wide.index_select(0, (positions - back).clamp(min=0))
        if back:
            # Values before the row's first token come from the state, whose last value directly precedes that token.
            column = (past + rows.offset - back).clamp(min=0, max=past - 1)
            older = of_token.gather(2, column.view(-1, 1, 1).expand(-1, x.shape[1], 1))[:, :, 0]
            value = torch.where((rows.offset >= back)[:, None], value, older)
        result = result + value * weight[:, past - back].float()
    if past:
        columns = []
        for index in range(past):
            token = rows.lengths - past + index  # index in the row; negative if the value was in the state before
            new = wide.index_select(0, (rows.starts + token).clamp(min=0, max=x.shape[0] - 1))
            column = (rows.lengths + index).clamp(max=past - 1)
            old = before.gather(2, column.view(-1, 1, 1).expand(-1, x.shape[1], 1))[:, :, 0]
            columns.append(torch.where((token >= 0)[:, None], new, old))
        rows.store(torch.stack(columns, 2), state)
    return (torch.nn.functional.silu(result) if silu else result).to(x.dtype)


def _scan_samples(space: SampleSpace) -> Iterator[Sample]:
    for batch in _BATCHES:
        tokens, slots = _sizes(batch)
        for label, heads, head, groups, states, per_state in (("heads", 4, 3, 2, 5, 1), ("channels", 6, 1, 1, 4, 4)):
            state = space.normal(slots, heads, head, states, dtype=torch.float32)
            a = -space.uniform(heads, per_state) - 0.1
            yield Sample(
                f"{batch.label}, {label}",
                (
                    space.normal(tokens, heads, head),
                    space.normal(tokens, heads),
                    a,
                    space.normal(tokens, groups, states),
                    space.normal(tokens, groups, states),
                    space.normal(heads),
                    space.normal(heads),
                    state,
                    *_metadata(space, batch),
                    max(batch.lengths),
                ),
            )


@operator(
    "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, Tensor(a!) state,"
    " Tensor state_indices, Tensor query_start_loc, Tensor seq_lens, int longest) -> Tensor",
    samples=_scan_samples,
    fake=_like,
    tolerances=_TOLERANCES,
)
def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Computes Mamba's recurrence: h = exp(t a) h + t x b, y = h c + d x, with t = softplus(dt + dt_bias).

    x [tokens, heads, head]; dt [tokens, heads]; a [heads, states or 1]; b, c [tokens, groups, states], where several
    heads share a group; d, dt_bias [heads]; state [slots, heads, head, states] is updated. `longest` is the number of
    tokens of the longest row. Mamba 1 has a head of size 1 for each channel.
    """
    rows = _Rows.of(x.shape[0], state_indices, query_start_loc, seq_lens)
    shared = x.shape[1] // b.shape[1]
    times = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    times = torch.nn.functional.softplus(times)
    hidden, decay, results = rows.load(state), a.float()[None, :, None, :], []
    for step in range(longest):
        now, t = rows.at(step, x), rows.at(step, times)[:, :, None, None]
        into = rows.at(step, b).repeat_interleave(shared, 1)[:, :, None, :]
        out = rows.at(step, c).repeat_interleave(shared, 1)[:, :, None, :]
        hidden = rows.update(step, torch.exp(t * decay) * hidden + t * now[..., None] * into, hidden)
        result = (hidden * out).sum(-1)
        results.append(result if d is None else result + now * d.float()[None, :, None])
    rows.store(hidden, state)
    return rows.by_token(results).to(x.dtype)


def _delta_samples(space: SampleSpace) -> Iterator[Sample]:
    for batch in _BATCHES:
        tokens, slots = _sizes(batch)
        key = torch.nn.functional.normalize(space.normal(tokens, 2, 6).float(), dim=-1).to(space.dtype)
        yield Sample(
            batch.label,
            (
                space.normal(tokens, 2, 6) / 6,
                key,
                space.normal(tokens, 4, 3),
                -space.uniform(tokens, 4),
                space.uniform(tokens, 4),
                space.normal(slots, 4, 3, 6, dtype=torch.float32),
                *_metadata(space, batch),
                max(batch.lengths),
            ),
        )


def _like_value(_query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_args: object) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor strength, Tensor(a!) state, Tensor state_indices,"
    " Tensor query_start_loc, Tensor seq_lens, int longest) -> Tensor",
    samples=_delta_samples,
    fake=_like_value,
    tolerances=_TOLERANCES,
)
def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Computes the gated delta rule: s = exp(decay) s; s = s + strength (value - s key) key; result = s query.

    query, key [tokens, key heads, head]; value [tokens, heads, value head]; decay, strength [tokens, heads]; state s
    [slots, heads, value head, head] is updated. Several heads share a key head. `longest` is the number of tokens of
    the longest row.
    """
    rows = _Rows.of(query.shape[0], state_indices, query_start_loc, seq_lens)
    shared = value.shape[1] // key.shape[1]
    memory, results = rows.load(state), []
    for step in range(longest):
        k = rows.at(step, key).repeat_interleave(shared, 1)[:, :, None, :]
        q = rows.at(step, query).repeat_interleave(shared, 1)[:, :, None, :]
        decayed = memory * torch.exp(rows.at(step, decay))[:, :, None, None]
        delta = rows.at(step, value) - (decayed * k).sum(-1)
        delta = delta * rows.at(step, strength)[:, :, None]
        memory = rows.update(step, decayed + delta[..., None] * k, memory)
        results.append((memory * q).sum(-1))
    rows.store(memory, state)
    return rows.by_token(results).to(value.dtype)
