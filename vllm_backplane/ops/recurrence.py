"""Layers that carry a state from token to token: the short convolution, Mamba's scan, the gated delta rule.

Tokens lie one after another; row r of a batch has those from `query_start_loc[r]` to `query_start_loc[r + 1]`, and its
state in slot `state_indices[r]` of a cache whose first dimension are slots. A row whose context, `seq_lens[r]`, is no
longer than its tokens begins here: whatever an earlier request left in its slot is not read. A row without tokens is
padding and may name any slot; slot 0 is nobody's.

The references go step by step over the longest row, all rows at once, and read no value on the host: they can be
queued, and a decode step, whose longest row is one token, captured into a graph. Sums are taken in float32.
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
    """Where the tokens of a batch are, [rows] each but for the last two, which are [tokens]."""

    starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    resumed: torch.Tensor
    """Whether the row continues the state in its slot."""
    row: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(
        cls, tokens: int, state_indices: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
    ) -> _Rows:
        starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
        lengths = ends - starts
        places = torch.arange(tokens, device=starts.device)
        # Tokens past the last row are padding; their results are nobody's.
        row = (places[:, None] >= ends[None]).sum(1).clamp(max=max(starts.shape[0] - 1, 0))
        return cls(
            starts,
            lengths,
            torch.where(lengths > 0, state_indices.long(), 0).clamp(min=0),
            seq_lens.long() > lengths,
            row,
            places - starts.index_select(0, row),
        )

    def load(self, state: torch.Tensor) -> torch.Tensor:
        """The rows' states in float32; zero where a row begins."""
        held = state.index_select(0, self.slots).float()
        return torch.where(self.resumed.view(-1, *[1] * (held.dim() - 1)), held, torch.zeros_like(held))

    def store(self, new: torch.Tensor, state: torch.Tensor) -> None:
        state.index_copy_(0, self.slots, new.to(state.dtype))

    def at(self, step: int, values: torch.Tensor) -> torch.Tensor:
        """The rows' values of one step; of a row that is over, those of any token."""
        return values.index_select(0, (self.starts + step).clamp(max=values.shape[0] - 1)).float()

    def kept(self, step: int, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """The new state of rows that have a token at this step, the old one of the others."""
        return torch.where((self.lengths > step).view(-1, *[1] * (new.dim() - 1)), new, old)

    def in_order(self, steps: list[torch.Tensor]) -> torch.Tensor:
        """Results of all rows, step by step, as one of each token."""
        joined = torch.stack(steps).flatten(0, 1)
        offset = self.offset.clamp(min=0, max=len(steps) - 1)
        return joined.index_select(0, offset * self.starts.shape[0] + self.row)


class _Batch(NamedTuple):
    """Rows of a sample: how many tokens each has, and how many came before."""

    label: str
    lengths: list[int]
    before: list[int]
    padding: int = 0
    """Tokens that belong to no row."""


_BATCHES = (
    _Batch("one prompt", [7], [0]),
    _Batch("decoding", [1, 1, 1], [4, 9, 1]),
    _Batch("a prompt goes on", [5], [3]),
    _Batch("mixed", [1, 6, 2, 1], [8, 0, 5, 0]),
    _Batch("a row of padding", [1, 1, 0], [4, 2, 0], padding=1),
)


def _places(space: SampleSpace, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """state_indices, query_start_loc, seq_lens; slots are not in the order of rows."""
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
    """Tokens, and slots of the cache."""
    return sum(batch.lengths) + batch.padding, len(batch.lengths) + 2


def _conv_samples(space: SampleSpace) -> Iterator[Sample]:
    for batch in _BATCHES:
        tokens, slots = _sizes(batch)
        for width, bias, silu in ((4, True, True), (2, False, False)):
            state = space.normal(slots, width - 1, 6).transpose(1, 2)
            x, weight = space.normal(tokens, 6), space.normal(6, width)
            yield Sample(
                f"{batch.label}, width {width}",
                (x, weight, space.normal(6) if bias else None, state, *_places(space, batch), silu),
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
    """Each channel's sum over its last few values, weighted; SiLU after it if wanted.

    x [tokens, channels]; weight [channels, width], that of the present token last; state [slots, channels, at least
    width - 1] holds the values before, oldest first, and is brought up to date.
    """
    past = weight.shape[1] - 1
    rows = _Rows.of(x.shape[0], state_indices, query_start_loc, seq_lens)
    state = state[:, :, :past]
    before = rows.load(state)
    wide, places = x.float(), torch.arange(x.shape[0], device=x.device)
    result = torch.zeros_like(wide) if bias is None else bias.float().expand_as(wide)
    of_token = before.index_select(0, rows.row)
    for back in range(past + 1):
        value = wide.index_select(0, (places - back).clamp(min=0))
        if back:
            # Before the row's first token here: the last value of the state is one back from it.
            column = (past + rows.offset - back).clamp(min=0, max=past - 1)
            older = of_token.gather(2, column.view(-1, 1, 1).expand(-1, x.shape[1], 1))[:, :, 0]
            value = torch.where((rows.offset >= back)[:, None], value, older)
        result = result + value * weight[:, past - back].float()
    if past:
        columns = []
        for place in range(past):
            since = rows.lengths - past + place  # which of the row's tokens
            new = wide.index_select(0, (rows.starts + since).clamp(min=0, max=x.shape[0] - 1))
            column = (rows.lengths + place).clamp(max=past - 1)
            old = before.gather(2, column.view(-1, 1, 1).expand(-1, x.shape[1], 1))[:, :, 0]
            columns.append(torch.where((since >= 0)[:, None], new, old))
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
                    *_places(space, batch),
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
    """Mamba's recurrence: h = exp(t a) h + t x b, y = h c + d x, with t = softplus(dt + dt_bias).

    x [tokens, heads, head]; dt [tokens, heads]; a [heads, states or 1]; b, c [tokens, groups, states], of which
    several heads share one; d, dt_bias [heads]; state [slots, heads, head, states] is brought up to date. `longest` is
    the number of tokens of the longest row. Mamba has a head of size 1 for each channel.
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
        hidden = rows.kept(step, torch.exp(t * decay) * hidden + t * now[..., None] * into, hidden)
        result = (hidden * out).sum(-1)
        results.append(result if d is None else result + now * d.float()[None, :, None])
    rows.store(hidden, state)
    return rows.in_order(results).to(x.dtype)


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
                *_places(space, batch),
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
    """A memory that forgets and corrects itself: s = exp(decay) s; s = s + strength (value - s key) key; s query.

    query, key [tokens, key heads, head]; value [tokens, heads, value head]; decay, strength [tokens, heads]; state
    [slots, heads, value head, head] is brought up to date. Several heads share a key head. `longest` is the number of
    tokens of the longest row.
    """
    rows = _Rows.of(query.shape[0], state_indices, query_start_loc, seq_lens)
    shared = value.shape[1] // key.shape[1]
    memory, results = rows.load(state), []
    for step in range(longest):
        where = rows.at(step, key).repeat_interleave(shared, 1)[:, :, None, :]
        asked = rows.at(step, query).repeat_interleave(shared, 1)[:, :, None, :]
        faded = memory * torch.exp(rows.at(step, decay))[:, :, None, None]
        missing = rows.at(step, value) - (faded * where).sum(-1)
        missing = missing * rows.at(step, strength)[:, :, None]
        memory = rows.kept(step, faded + missing[..., None] * where, memory)
        results.append((memory * asked).sum(-1))
    rows.store(memory, state)
    return rows.in_order(results).to(value.dtype)
