"""Tests the modelled cost of calls: bytes and operations of a call, not the size of the tables that it reads from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import byref
from functools import partial
from typing import Any

import pytest
import torch
from conftest import sim

from vllm_backplane import ops
from vllm_backplane.device.graph import CapturedCalls
from vllm_backplane.devices.sim.library import Model, driver

CARD = torch.device("bpnpu", 0)
GB = 1e9
"""A rate of one byte or operation per nanosecond."""


def charge(model: Model) -> None:
    torch.bpnpu.synchronize()
    driver("set_model", byref(model))


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    charge(Model(on=0))


def modelled_ns(work: Callable[[], Any]) -> float:
    torch.bpnpu.synchronize()
    before = torch.bpnpu.launch_counters()["modelled_busy_ns"]
    work()
    torch.bpnpu.synchronize()
    return round(torch.bpnpu.launch_counters()["modelled_busy_ns"] - before, 3)


def moved(work: Callable[[], Any]) -> float:
    """Returns the modelled bytes of a call."""
    charge(Model(on=1, memory_bandwidth=GB, link_bandwidth=GB))
    return modelled_ns(work)


def computed(work: Callable[[], Any]) -> float:
    """Returns the modelled floating-point operations of a call."""
    charge(Model(on=1, flop_rate=GB))
    return modelled_ns(work)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(CARD)


# --- rows of a table --------------------------------------------------------------------------------------------------

TABLES = pytest.mark.parametrize("rows", [8, 4096])


@TABLES
def test_an_embedding_reads_its_rows(rows: int) -> None:
    table, ids = torch.zeros(rows, 64, device=CARD), ints(3, 1, 7)
    assert moved(lambda: torch.nn.functional.embedding(ids, table)) == 3 * 64 * 4 * 2 + 3 * 8
    assert moved(lambda: ops.embedding.call(ids, table)) == 3 * 64 * 4 * 2 + 3 * 8


@TABLES
def test_what_picks_is_charged_with_what_it_picks(rows: int) -> None:
    table, ids = torch.zeros(rows, 64, device=CARD), ints(3, 1, 7)
    out = torch.empty(3, 64, device=CARD)
    assert moved(lambda: torch.index_select(table, 0, ids, out=out)) == 2 * 768 + 24
    assert moved(lambda: table[ids]) == 2 * 768 + 24
    assert moved(lambda: table.gather(0, ids.unsqueeze(1))) == 2 * 3 * 4 + 24
    assert moved(lambda: torch.take(table, ids)) == 2 * 3 * 4 + 24


@TABLES
def test_what_places_is_charged_with_what_it_places(rows: int) -> None:
    table, ids = torch.zeros(rows, 64, device=CARD), ints(3, 1, 7)
    new, mask = torch.ones(3, 64, device=CARD), torch.zeros(rows, dtype=torch.bool, device=CARD)
    mask[2:5] = True

    def put() -> None:
        table[ids] = new

    def put_by_mask() -> None:
        table[mask] = new

    assert moved(put) == 768 + 768 + 24
    assert moved(put_by_mask) == 768 + 768 + rows
    assert moved(lambda: table.index_copy_(0, ids, new)) == 768 + 768 + 24
    assert moved(lambda: table.index_add_(0, ids, new)) == 3 * 768 + 24
    assert moved(lambda: table.index_fill_(0, ids, 2.0)) == 768 + 24
    assert moved(lambda: table.scatter_(0, ids.unsqueeze(1), new)) == 3 * 4 * 2 + 24
    assert moved(lambda: table.scatter_add_(0, ids.unsqueeze(1), new)) == 3 * 4 * 3 + 24


def test_a_slice_is_charged_with_itself() -> None:
    wide = torch.zeros(10, 1000, device=CARD)
    part, repeated = wide[:, :10], torch.zeros(1, 10, device=CARD).expand(10, 10)
    assert moved(lambda: part.add_(1)) == 10 * 10 * 4 * 2
    assert moved(lambda: torch.add(part, repeated)) == 2 * 400 + 40


# --- the cache and attention ------------------------------------------------------------------------------------------

BLOCKS = pytest.mark.parametrize("blocks", [16, 512])
HEADS, KV_HEADS, HEAD, SIZE = 6, 2, 8, 4


def cache(blocks: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.zeros(blocks, KV_HEADS, SIZE, 2 * HEAD, device=CARD, dtype=dtype)
    return whole[..., :HEAD], whole[..., HEAD:]


@BLOCKS
def test_writing_the_cache_costs_the_rows_that_are_written(blocks: int) -> None:
    keys, values = cache(blocks, torch.float16)
    new = torch.ones(3, KV_HEADS, HEAD, device=CARD)
    slots = ints(5, -1, 40)
    written = 2 * KV_HEADS * HEAD
    assert moved(lambda: ops.kv_cache_write.call(new, new, keys, values, slots, 1.0, 1.0)) == (
        2 * written * (4 + 2) + 3 * 8
    )


@BLOCKS
def test_zeroing_blocks_costs_those_blocks(blocks: int) -> None:
    keys, _ = cache(blocks)
    ids = ints(2, 5)
    assert moved(lambda: ops.kv_cache_zero_blocks.call(keys, ids)) == 2 * KV_HEADS * SIZE * HEAD * 4 + 2 * 8


def visible(query: int, length: int, rows: int, causal: bool, window: int) -> list[int]:
    """Returns how many keys a query sees, counted one by one."""
    position = length - rows + query
    return [
        key
        for key in range(length)
        if not (causal and key > position) and not (window and abs(key - position) >= window)
    ]


@BLOCKS
@pytest.mark.parametrize("width", [4, 64], ids=lambda width: f"table of {width}")
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 5), (False, 0)])
def test_attention_costs_what_it_sees(blocks: int, width: int, causal: bool, window: int) -> None:
    """Computes a batch with contexts of 5, 11 and 8 tokens, of which 1, 3 and 8 are new."""
    rows, lengths = (1, 3, 8), (5, 11, 8)
    keys, values = cache(blocks)
    query = torch.randn(12, HEADS, HEAD).to(CARD)
    out = torch.empty_like(query)
    table = torch.zeros(3, width, dtype=torch.int32, device=CARD)
    starts, contexts = ints(0, 1, 4, 12, dtype=torch.int32), ints(*lengths, dtype=torch.int32)

    def attend() -> None:
        ops.paged_attention.call(
            query, keys, values, table, starts, contexts, 0.1, causal, window, 0.0, None, None, 1.0, 1.0, out
        )

    seen = [[visible(q, n, r, causal, window) for q in range(r)] for r, n in zip(rows, lengths, strict=True)]
    pairs = sum(len(one) for request in seen for one in request)
    read = [len({key for one in request for key in one}) for request in seen]
    entries = sum(-(-count // SIZE) for count in read)
    expected = sum(read) * KV_HEADS * 2 * HEAD * 4 + 2 * query.nbytes + 4 * entries + 4 * 4 + 4 * 3
    assert moved(attend) == expected
    assert computed(attend) == pairs * HEADS * (2 * HEAD + 2 * HEAD)


def test_a_replayed_step_is_charged_with_its_own_lengths() -> None:
    keys, values = cache(16)
    query, contexts = torch.randn(1, HEADS, HEAD).to(CARD), ints(1, dtype=torch.int32)
    out, table, starts = torch.empty_like(query), ints(0, 1, 2, 3, dtype=torch.int32), ints(0, 1, dtype=torch.int32)
    calls = CapturedCalls(sim.new_graph)

    def attend() -> torch.Tensor:
        ops.paged_attention.call(
            query, keys, values, table[None], starts, contexts, 0.1, True, 0, 0.0, None, None, 1.0, 1.0, out
        )
        return out

    calls.capture("step", attend, {"query": query})
    costs = []
    for length in (1, 9):
        contexts.fill_(length)
        costs.append(computed(lambda: calls.replay("step", {"query": query})))
    assert costs == [length * HEADS * 4 * HEAD for length in (1, 9)]


def test_attention_without_a_cache_counts_its_pairs() -> None:
    query = torch.randn(5, HEADS, HEAD).to(CARD)
    keys = torch.randn(5, KV_HEADS, HEAD).to(CARD)
    out, starts = torch.empty_like(query), ints(0, 2, 5, dtype=torch.int32)

    def attend() -> None:
        ops.varlen_attention.call(query, keys, keys, starts, 0.1, False, 0, 0.0, None, None, out)

    assert computed(attend) == (2 * 2 + 3 * 3) * HEADS * 4 * HEAD


@TABLES
def test_tables_by_position_cost_a_row_per_token(rows: int) -> None:
    table, query = torch.zeros(rows, HEAD, device=CARD), torch.zeros(2, HEADS * HEAD, device=CARD)
    positions = ints(3, 5)
    assert moved(lambda: ops.rotary_embedding.call(positions, query, None, table, HEAD, True)) == (
        2 * 8 + 2 * query.nbytes + 2 * HEAD * 4
    )
    block_table, starts = torch.zeros(1, rows, dtype=torch.int32, device=CARD), ints(0, 2, dtype=torch.int32)
    slots = torch.zeros(2, dtype=torch.int64, device=CARD)
    assert moved(lambda: ops.compute_slot_mapping.call(starts, positions, block_table, slots, 4, -1)) == (
        2 * 4 + 2 * (8 + 4) + 2 * 8
    )


# --- what was charged before ------------------------------------------------------------------------------------------


def test_products_are_charged_with_their_operations() -> None:
    x, weight = torch.randn(3, 16).to(CARD), torch.randn(5, 16).to(CARD)
    assert computed(lambda: ops.linear.call(x, weight, None)) == 2 * 3 * 16 * 5
    assert computed(lambda: x @ weight.t()) == 2 * 3 * 16 * 5
    assert moved(lambda: ops.linear.call(x, weight, None)) == x.nbytes + weight.nbytes + 3 * 5 * 4
    assert computed(lambda: ops.logits.call(x, weight, None)) == 2 * 3 * 16 * 5
    in_blocks = torch.zeros(1, 8, 16, device=CARD)  # of which five rows are the weight
    assert computed(lambda: ops.blocked_linear.call(x, in_blocks, 5, None)) == 2 * 3 * 16 * 5
    scales = torch.ones(1, 1, 8, device=CARD)
    for bits, steps in ((8, 4), (4, 2)):
        codes = torch.zeros(1, steps, 8, 4, dtype=torch.uint8, device=CARD)
        product = partial(ops.quantized_linear.call, x, codes, scales, None, bits, 5, None)
        assert computed(product) == 2 * 3 * 16 * 5
        assert moved(product) == x.nbytes + codes.nbytes + scales.nbytes + 3 * 5 * 4


def test_nothing_is_charged_while_it_is_off() -> None:
    charge(Model(on=0))
    assert modelled_ns(lambda: torch.ones(100, device=CARD) + 1) == 0
