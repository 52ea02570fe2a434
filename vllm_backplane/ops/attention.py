"""Declares the attention operators: over a paged KV cache, and over a ragged batch without a cache.

Softmax and sums are computed in float32 for every storage dtype. The paged reference reads the lengths on
the host, once per call, to gather only the visible part of the cache; a device that captures graphs
therefore needs a kernel of its own. Slots past the end of a context, and blocks behind a sliding window, may
hold any bits, including NaN. A key or value that a query does not see must not affect its result, not even
multiplied by zero, whether or not other queries of the same prompt see it.

A row that sees no key at all (a padding request with no context) yields zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from vllm_backplane.errors import OperatorError
from vllm_backplane.ops.kv_cache import as_bits, paged_cache
from vllm_backplane.ops.operator import Sample, SampleSpace, nothing, operator

_WORKING_ELEMENTS = 1 << 24
"""Bound on float32 temporaries: batches and rows are split into parts of about 64 MiB."""


@dataclass(frozen=True, slots=True)
class _Params:
    """Holds the parameters of a layer's attention."""

    scale: float
    causal: bool
    window: int
    soft_cap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    def first_visible(self, position: int) -> int:
        """Returns the position of the first key that a query at `position` sees."""
        return max(0, position - self.window + 1) if self.window > 0 else 0

    def visible_end(self, position: int, length: int) -> int:
        """Returns the position after the last key that a query at `position` sees in a context of this length."""
        if self.causal:
            return max(0, min(length, position + 1))
        return max(0, min(length, position + self.window)) if self.window > 0 else length

    def is_visible(self, offset: torch.Tensor) -> torch.Tensor:
        """Returns whether a query sees a key; `offset` is the key's position minus the query's."""
        visible = offset <= 0 if self.causal else torch.ones_like(offset, dtype=torch.bool)
        if self.window > 0:
            visible = visible & (offset > -self.window) & (offset < self.window)
        return visible


class _Context(NamedTuple):
    """Holds the keys and values of a batch of requests.

    key, value [batch, kv_heads, keys, head], float32; positions [batch, keys]; valid [batch, keys] is true
    for keys that exist. A value that is not valid must be finite, because it is multiplied by zero.
    """

    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor


def _attend(query: torch.Tensor, context: _Context, query_positions: torch.Tensor, params: _Params) -> torch.Tensor:
    """Returns masked attention of a batch of equal shapes, in float32 [batch, rows, heads, value head].

    query [batch, rows, heads, head]; query_positions [batch, rows]; the context has at least one key.
    """
    key, value, key_positions, valid = context
    batch, rows, heads, head = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group = heads // kv_heads
    grouped = query.float().view(batch, rows, kv_heads, group, head).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(grouped.reshape(batch, kv_heads, group * rows, head), key.transpose(2, 3))
    scores = scores.view(batch, kv_heads, group, rows, keys).mul_(params.scale)
    if params.soft_cap > 0:
        scores = scores.div_(params.soft_cap).tanh_().mul_(params.soft_cap)
    offset = key_positions[:, None, :] - query_positions[:, :, None]
    if params.alibi_slopes is not None:
        scores += params.alibi_slopes.float().view(kv_heads, group, 1, 1) * offset[:, None, None]
    visible = params.is_visible(offset) & valid[:, None, :]
    scores = scores.masked_fill_(~visible[:, None, None], float("-inf"))

    peak = scores.amax(-1, keepdim=True)
    sinks = None
    if params.sinks is not None:
        sinks = params.sinks.float().view(kv_heads, group, 1, 1)
        peak = torch.maximum(peak, sinks)
    # A row without keys has no peak. Any finite number works, because its weights are all zero.
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - peak)
    total = total.masked_fill(total == 0.0, 1.0)
    result = _weighted_values(weights, value, visible) / total
    return result.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, value.shape[-1])


def _weighted_values(weights: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Returns weights @ value for every row: [batch, kv_heads, group, rows, value head].

    weights [batch, kv_heads, group, rows, keys], zero where a key is not visible [batch, rows, keys]. Zero weights do
    not keep out NaN and infinities, so if there are any, each row is computed alone, with the values that it sees. In a
    batch of single rows, the context has only values that the row sees.
    """
    batch, kv_heads, group, rows, keys = weights.shape
    result = torch.matmul(weights.view(batch, kv_heads, group * rows, keys), value)
    result = result.view(batch, kv_heads, group, rows, value.shape[-1])
    if rows == 1 or bool(visible.all() | value.isfinite().all()):
        return result
    for row in range(rows):
        seen = value.masked_fill(~visible[:, None, row, :, None], 0.0)
        result[:, :, :, row] = torch.matmul(weights[:, :, :, row], seen)
    return result


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_position: int,
    first_key: int,
    length: int,
    params: _Params,
    out: torch.Tensor,
) -> None:
    """Computes one request with any number of rows, in parts so that the scores stay bounded.

    query, out [rows, heads, head]; key, value [1, kv_heads, keys, head], float32, from position `first_key`
    on; the request's context ends at `length`.
    """
    rows, heads = query.shape[0], query.shape[1]
    step = max(1, _WORKING_ELEMENTS // (heads * max(1, key.shape[2])))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        begin = max(first_key, params.first_visible(first_position + start))
        end = params.visible_end(first_position + stop - 1, length)
        if end <= begin:
            out[start:stop].zero_()
            continue
        seen = slice(begin - first_key, end - first_key)
        positions = torch.arange(begin, end, device=query.device)[None]
        valid = torch.ones_like(positions, dtype=torch.bool)
        context = _Context(key[:, :, seen], value[:, :, seen], positions, valid)
        at = torch.arange(first_position + start, first_position + stop, device=query.device)[None]
        out[start:stop] = _attend(query[None, start:stop], context, at, params)[0]


@dataclass(frozen=True, slots=True)
class _Pages:
    """Reads keys and values from a paged KV cache."""

    key: torch.Tensor
    value: torch.Tensor
    v_scale: float

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    def elements(self, blocks: int) -> int:
        """Returns the number of elements in so many blocks of keys and values."""
        return blocks * self.block_size * self.key.shape[1] * (self.key.shape[-1] + self.value.shape[-1])

    def read(
        self, tables: torch.Tensor, columns: torch.Tensor, lengths: torch.Tensor, first_visible: torch.Tensor
    ) -> _Context:
        """Returns the keys and values in the given columns of the block tables.

        tables [batch, width]; columns [batch, blocks]; lengths, first_visible [batch]. Keys are not multiplied
        by their scale; the caller multiplies the scores by it. Values that are not valid are zero.
        """
        inside = columns * self.block_size < lengths[:, None]
        blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1)).long()
        blocks = blocks.masked_fill(~inside, 0)
        offsets = torch.arange(self.block_size, device=tables.device)
        positions = (columns[:, :, None] * self.block_size + offsets).flatten(1)
        valid = (positions < lengths[:, None]) & (positions >= first_visible[:, None])
        value = _gather(self.value, blocks).masked_fill_(~valid[:, None, :, None], 0.0)
        if self.v_scale != 1.0:
            value = value.mul_(self.v_scale)
        return _Context(_gather(self.key, blocks), value, positions, valid)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Returns blocks [batch, count] of a cache as a float32 copy [batch, kv_heads, count * block_size, head]."""
    batch, count = blocks.shape
    _, kv_heads, block_size, head = cache.shape
    picked = as_bits(cache).index_select(0, blocks.flatten()).view(cache.dtype)
    picked = picked.view(batch, count, kv_heads, block_size, head).permute(0, 2, 1, 3, 4)
    copy = torch.empty(picked.shape, dtype=torch.float32, device=cache.device)
    return copy.copy_(picked).view(batch, kv_heads, count * block_size, head)


def _decode_batches(requests: list[int], spans: list[int], max_blocks: int) -> Iterator[tuple[list[int], int]]:
    """Yields (requests, blocks of each) such that requests times blocks stays within `max_blocks`.

    The longest come first, so that a batch has requests of similar length and little padding.
    """
    requests = sorted(requests, key=lambda request: -spans[request])
    while requests:
        widest = spans[requests[0]]
        count = max(1, max_blocks // max(1, widest))
        yield requests[:count], widest
        requests = requests[count:]


def _check_heads(operator_name: str, query: torch.Tensor, kv_heads: int) -> None:
    if query.shape[1] % kv_heads:
        raise OperatorError(
            f"{operator_name}: {query.shape[1]} query heads cannot be divided evenly among {kv_heads} key heads; "
            "repeat or split the key heads first"
        )


def _paged_sample(
    space: SampleSpace,
    label: str,
    lengths: list[int],
    rows: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head: int = 8,
    value_head: int | None = None,
    block_size: int = 4,
    cache_dtype: torch.dtype | None = None,
    nhd: bool = False,
    causal: bool = True,
    window: int = -1,
    soft_cap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    poisoned: bool = False,
) -> Sample:
    """Returns a batch whose blocks are scattered over the cache; `poisoned` puts NaN into every unused slot."""
    used = [-(-length // block_size) for length in lengths]
    blocks, width = sum(used) + 3, max([*used, 1]) + 1
    key_cache, value_cache = paged_cache(
        space, blocks, kv_heads, block_size, head,
        value_head=value_head, dtype=cache_dtype, nhd=nhd,
    )  # fmt: skip
    order = torch.randperm(blocks - 1, generator=space.generator).add(1).tolist()
    table = [[order.pop() for _ in range(count)] + [0] * (width - count) for count in used]
    if poisoned:
        empty = torch.ones(blocks, block_size, dtype=torch.bool)
        for length, row in zip(lengths, table, strict=True):
            for position in range(length):
                empty[row[position // block_size], position % block_size] = False
        hole = empty[:, None, :, None].to(space.device)
        for cache in (key_cache, value_cache):
            cache.copy_(cache.masked_fill(hole, float("nan")))
    tokens = sum(rows)
    starts = [sum(rows[:i]) for i in range(len(rows) + 1)]
    return Sample(
        label,
        (
            space.normal(tokens, heads, head),
            key_cache,
            value_cache,
            space.tensor(table, torch.int32).view(len(rows), width),
            space.tensor(starts, torch.int32),
            space.tensor(lengths, torch.int32),
            head**-0.5,
            causal,
            window,
            soft_cap,
            space.uniform(heads) if alibi else None,
            space.normal(heads) if sinks else None,
            *scales,
            space.normal(tokens, heads, value_head or head),
        ),
    )


def _paged_samples(space: SampleSpace) -> Iterator[Sample]:
    decode, single = [9, 1, 4, 30], [1, 1, 1, 1]
    mixed, ragged = [9, 13, 4, 6, 5], [1, 5, 4, 0, 2]
    for label, lengths, rows in (("decode", decode, single), ("mixed", mixed, ragged)):
        yield _paged_sample(space, label, lengths, rows)
        yield _paged_sample(space, f"{label}, NHD layout", lengths, rows, nhd=True)
        yield _paged_sample(space, f"{label}, no head groups, odd size", lengths, rows, heads=3, kv_heads=3, head=5)
        yield _paged_sample(space, f"{label}, one key head", lengths, rows, heads=6, kv_heads=1, value_head=12)
        yield _paged_sample(space, f"{label}, window", lengths, rows, window=3)
        yield _paged_sample(space, f"{label}, window of one", lengths, rows, window=1)
        yield _paged_sample(space, f"{label}, not causal", lengths, rows, causal=False)
        yield _paged_sample(space, f"{label}, not causal, window", lengths, rows, causal=False, window=3)
        yield _paged_sample(space, f"{label}, soft cap", lengths, rows, soft_cap=0.5)
        yield _paged_sample(space, f"{label}, alibi", lengths, rows, alibi=True)
        yield _paged_sample(space, f"{label}, sinks", lengths, rows, sinks=True, window=5)
        yield _paged_sample(space, f"{label}, NaN outside", lengths, rows, poisoned=True)
        yield _paged_sample(space, f"{label}, scaled", lengths, rows, scales=(0.5, 2.0))
        for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
            yield _paged_sample(space, f"{label}, {fp8}", lengths, rows, cache_dtype=fp8, scales=(0.5, 2.0))
    yield _paged_sample(space, "padding requests", [5, 0, 0], [1, 1, 0])
    yield _paged_sample(space, "no requests", [], [])
    yield _paged_sample(space, "long context", [300, 257], [1, 9], block_size=16)


def _varlen_samples(space: SampleSpace) -> Iterator[Sample]:
    def sample(
        label: str,
        rows: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head: int = 8,
        value_head: int | None = None,
        causal: bool = False,
        window: int = -1,
        soft_cap: float = 0.0,
        alibi: bool = False,
        sinks: bool = False,
    ) -> Sample:
        tokens = sum(rows)
        starts = [sum(rows[:i]) for i in range(len(rows) + 1)]
        return Sample(
            label,
            (
                space.normal(tokens, heads, head),
                space.normal(tokens, kv_heads, head),
                space.normal(tokens, kv_heads, value_head or head),
                space.tensor(starts, torch.int32),
                head**-0.5,
                causal,
                window,
                soft_cap,
                space.uniform(heads) if alibi else None,
                space.normal(heads) if sinks else None,
                space.normal(tokens, heads, value_head or head),
            ),
        )

    rows = [5, 1, 0, 9]
    yield sample("plain", rows)
    yield sample("causal", rows, causal=True)
    yield sample("window", rows, window=3)
    yield sample("window of one", rows, window=1)
    yield sample("causal, window", rows, causal=True, window=3)
    yield sample("no head groups, odd size", rows, heads=3, kv_heads=3, head=5, value_head=7)
    yield sample("one key head", rows, kv_heads=1)
    yield sample("soft cap", rows, soft_cap=0.5)
    yield sample("alibi", rows, alibi=True, causal=True)
    yield sample("sinks", rows, sinks=True)
    yield sample("no tokens", [0])
    yield sample("long", [130])


@operator(
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start_loc,"
    " Tensor seq_lens, float scale, bool causal, int sliding_window, float soft_cap, Tensor? alibi_slopes,"
    " Tensor? sinks, float k_scale, float v_scale, Tensor(a!) out) -> ()",
    samples=_paged_samples,
    fake=nothing,
    reads_values=True,
)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    sliding_window: int,
    soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
) -> None:
    """Computes attention of a ragged batch of queries over their contexts in a paged cache, into out.

    query, out [tokens, heads, head]; caches [blocks, kv_heads, block_size, head], strided; block_table
    [requests, width]. Request i has the query rows query_start_loc[i]:query_start_loc[i+1], which are the last
    of its seq_lens[i] positions. With a window w > 0, a query at p sees the keys in (p-w, p], or (p-w, p+w)
    if not causal. soft_cap > 0 turns a scaled score s into soft_cap * tanh(s / soft_cap); ALiBi then adds
    slope * (key position - query position). `sinks` has one more logit per head for the denominator.
    Rows of out that belong to no request are not written.
    """
    _check_heads("paged_attention", query, key_cache.shape[1])
    params = _Params(scale * k_scale, causal, sliding_window, soft_cap, alibi_slopes, sinks)
    pages = _Pages(key_cache, value_cache, v_scale)
    device, block_size = query.device, pages.block_size
    bounds, lengths = query_start_loc.tolist(), seq_lens.tolist()
    requests = len(bounds) - 1

    # The columns of the block table that a request needs begin with the first key that its first row sees.
    first_rows = [lengths[i] - (bounds[i + 1] - bounds[i]) for i in range(requests)]
    first_visible = [params.first_visible(position) for position in first_rows]
    first_column = [visible // block_size for visible in first_visible]
    spans = [max(0, -(-lengths[i] // block_size) - first_column[i]) for i in range(requests)]

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    def read(members: list[int], blocks: int) -> _Context:
        columns = on_device([first_column[i] for i in members])[:, None] + torch.arange(blocks, device=device)
        tables = block_table.index_select(0, on_device(members))
        limits = on_device([lengths[i] for i in members]), on_device([first_visible[i] for i in members])
        return pages.read(tables, columns, *limits)

    single = [i for i in range(requests) if bounds[i + 1] - bounds[i] == 1]
    cost = pages.elements(1) + query.shape[1] * block_size
    for members, blocks in _decode_batches(single, spans, _WORKING_ELEMENTS // cost):
        rows = on_device([bounds[i] for i in members])
        if blocks == 0:
            out.index_fill_(0, rows, 0.0)
            continue
        context = read(members, blocks)
        at = on_device([first_rows[i] for i in members])[:, None]
        result = _attend(query.index_select(0, rows)[:, None], context, at, params)
        out.index_copy_(0, rows, result[:, 0].to(out.dtype))

    for i in range(requests):
        if bounds[i + 1] - bounds[i] < 2:
            continue
        own = slice(bounds[i], bounds[i + 1])
        if spans[i] == 0:
            out[own].zero_()
            continue
        context = read([i], spans[i])
        start = first_column[i] * block_size
        _attend_rows(query[own], context.key, context.value, first_rows[i], start, lengths[i], params, out[own])


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor query_start_loc, float scale, bool causal,"
    " int sliding_window, float soft_cap, Tensor? alibi_slopes, Tensor? sinks, Tensor(a!) out) -> ()",
    samples=_varlen_samples,
    fake=nothing,
)
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    causal: bool,
    sliding_window: int,
    soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Computes attention of a ragged batch in which each request's keys are its own rows, without a cache.

    query, out [tokens, heads, head]; key, value [tokens, kv_heads, head]. The other arguments are those of
    paged_attention.
    """
    _check_heads("varlen_attention", query, key.shape[1])
    params = _Params(scale, causal, sliding_window, soft_cap, alibi_slopes, sinks)
    bounds = query_start_loc.tolist()
    for begin, end in pairwise(bounds):
        if begin == end:
            continue
        own_key = key[begin:end].transpose(0, 1)[None].float()
        own_value = value[begin:end].transpose(0, 1)[None].float()
        _attend_rows(query[begin:end], own_key, own_value, 0, 0, end - begin, params, out[begin:end])
