"""Tests the attention operators against their definition, written with numpy loops in float64."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from operator_checks import FLOAT_TYPES, assert_near, exact, private, run, samples, space

from vllm_backplane import ops
from vllm_backplane.errors import OperatorError


@dataclass
class Layer:
    scale: float
    causal: bool = True
    window: int = -1
    soft_cap: float = 0.0
    slopes: np.ndarray | None = None
    sinks: np.ndarray | None = None


def one_row(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, head: int, layer: Layer
) -> np.ndarray:
    """Returns attention of one query head at one position over [length, head] keys, computed by plain loops."""
    scores: dict[int, float] = {}
    for at in range(len(keys)):
        if layer.causal and at > position:
            continue
        if layer.window > 0 and abs(at - position) >= layer.window:
            continue
        score = layer.scale * math.fsum(a * b for a, b in zip(query, keys[at], strict=True))
        if layer.soft_cap > 0:
            score = layer.soft_cap * math.tanh(score / layer.soft_cap)
        if layer.slopes is not None:
            score += layer.slopes[head] * (at - position)
        scores[at] = score
    logits = list(scores.values()) + ([] if layer.sinks is None else [layer.sinks[head]])
    out = np.zeros(values.shape[-1])
    if not scores:
        return out
    total = math.fsum(math.exp(s - max(logits)) for s in logits)
    for at, score in scores.items():
        out += math.exp(score - max(logits)) / total * values[at]
    return out


def ragged(
    query: np.ndarray,
    contexts: list[tuple[np.ndarray, np.ndarray]],
    starts: list[int],
    out: np.ndarray,
    layer: Layer,
) -> np.ndarray:
    """Returns attention of every row; contexts[i] has the keys and values [length, kv_heads, head] of request i."""
    out = out.copy()
    for i, (keys, values) in enumerate(contexts):
        rows = starts[i + 1] - starts[i]
        for row in range(rows):
            position = len(keys) - rows + row
            for head in range(query.shape[1]):
                kv = head // (query.shape[1] // keys.shape[1])
                args = query[starts[i] + row, head], keys[:, kv], values[:, kv], position, head, layer
                out[starts[i] + row, head] = one_row(*args)
    return out


def paged_expected(args: tuple[Any, ...]) -> np.ndarray:
    (query, key_cache, value_cache, table, starts, lengths, scale, causal, window, soft_cap,
     slopes, sinks, k_scale, v_scale, out) = args  # fmt: skip
    keys, values, block_size = exact(key_cache) * k_scale, exact(value_cache) * v_scale, key_cache.shape[2]
    contexts = []
    for request, length in enumerate(lengths.tolist()):
        where = [(int(table[request, p // block_size]), p % block_size) for p in range(length)]
        shape = (length, *key_cache.shape[1::2])
        contexts.append(
            (
                np.array([keys[b, :, o] for b, o in where]).reshape(shape),
                np.array([values[b, :, o] for b, o in where]).reshape(length, *value_cache.shape[1::2]),
            )
        )
    layer = Layer(scale, causal, window, soft_cap, *(None if t is None else exact(t) for t in (slopes, sinks)))
    return ragged(exact(query), contexts, starts.tolist(), exact(out), layer)


def varlen_expected(args: tuple[Any, ...]) -> np.ndarray:
    query, key, value, starts, scale, causal, window, soft_cap, slopes, sinks, out = args
    bounds = starts.tolist()
    contexts = [(exact(key[a:b]), exact(value[a:b])) for a, b in pairwise(bounds)]
    layer = Layer(scale, causal, window, soft_cap, *(None if t is None else exact(t) for t in (slopes, sinks)))
    return ragged(exact(query), contexts, bounds, exact(out), layer)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_paged_over_samples(dtype: torch.dtype) -> None:
    for sample in samples(ops.paged_attention, dtype):
        after = run(ops.paged_attention, sample.args).args
        assert_near(after[-1], paged_expected(sample.args), sample.label)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_varlen_over_samples(dtype: torch.dtype) -> None:
    for sample in samples(ops.varlen_attention, dtype):
        after = run(ops.varlen_attention, sample.args).args
        assert_near(after[-1], varlen_expected(sample.args), sample.label)


def paged(
    lengths: list[int],
    rows: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    fill: float | None = None,
    width: int | None = None,
    padding: int = 0,
    causal: bool = True,
    window: int = 0,
    sinks: bool = False,
) -> list[Any]:
    """Returns the arguments of paged_attention with blocks in random order; unused slots hold `fill`."""
    source = space(dtype, seed=7)
    counts = [-(-n // block_size) for n in lengths]
    blocks = sum(counts) + 2
    cache = source.normal(blocks, kv_heads, block_size, 2 * head)
    order = iter(torch.randperm(blocks, generator=source.generator).tolist())
    width = width or max([*counts, 1])
    table = torch.full((len(lengths), width), padding, dtype=torch.int32)
    kept = torch.zeros(blocks, block_size, dtype=torch.bool)
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for column in range(count):
            table[request, column] = next(order)
        for p in range(length):
            kept[int(table[request, p // block_size]), p % block_size] = True
    if fill is not None:
        cache = torch.where(kept[:, None, :, None], cache, torch.tensor(fill, dtype=dtype))
    starts = torch.tensor([sum(rows[:i]) for i in range(len(rows) + 1)], dtype=torch.int32)
    tokens = sum(rows)
    return [
        source.normal(tokens, heads, head),
        cache[..., :head],
        cache[..., head:],
        table,
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        head**-0.5,
        causal,
        window,
        0.0,
        None,
        source.normal(heads) if sinks else None,
        1.0,
        1.0,
        torch.full((tokens, heads, head), 9.0, dtype=dtype),
    ]


def check_paged(args: list[Any], label: str) -> torch.Tensor:
    result = run(ops.paged_attention, tuple(args)).args[-1]
    assert_near(result, paged_expected(tuple(args)), label)
    return result


@pytest.mark.parametrize("rows", [[1, 1], [3, 1], [40, 17]], ids=["decode", "mixed", "prefill"])
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("window", [0, 5, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_slots_outside_a_context_do_not_matter(rows: list[int], fill: float, window: int, causal: bool) -> None:
    args = paged([43, 17], rows, fill=fill, window=window, causal=causal)
    assert torch.isfinite(check_paged(args, "outside")).all()


@pytest.mark.parametrize("rows", [[1, 1], [4, 2]], ids=["decode", "prefill"])
def test_slots_behind_the_window_do_not_matter(rows: list[int]) -> None:
    """vLLM frees such blocks: the table still has them, and another request may have written them."""
    args = paged([90, 70], rows, window=20)
    expected = paged_expected(tuple(args))
    for request, (length, count) in enumerate(zip([90, 70], rows, strict=True)):
        for position in range(length - count - 20 + 1):
            block = args[3][request, position // 16]
            args[1][block, :, position % 16] = float("nan")
            args[2][block, :, position % 16] = float("nan")
    result = run(ops.paged_attention, tuple(args)).args[-1]
    assert_near(result, expected, "behind the window")


@pytest.mark.parametrize("padding", [-1, 10**6])
def test_unused_table_entries_may_hold_anything(padding: int) -> None:
    args = paged([33, 5, 64], [1, 1, 3], width=9, padding=padding)
    check_paged(args, "table padding")


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_long_context_over_many_blocks(dtype: torch.dtype, sinks: bool) -> None:
    args = paged([700, 1, 512, 513], [1, 1, 2, 1], heads=2, kv_heads=1, dtype=dtype, sinks=sinks)
    check_paged(args, "long")


@pytest.mark.parametrize("elements", [1, 5000, 20000])
def test_cutting_into_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    module = sys.modules["vllm_backplane.ops.attention"]
    monkeypatch.setattr(module, "_WORKING_ELEMENTS", elements)
    for window in (0, 7):
        for causal in (True, False):
            args = paged([50, 3, 17, 64, 1, 31, 9], [1, 1, 1, 40, 1, 1, 9], window=window, causal=causal)
            check_paged(args, f"window {window}, causal {causal}")


def test_rows_that_no_request_owns_are_left_alone() -> None:
    args = paged([20, 4, 6], [1, 0, 3])
    args[0] = torch.cat([args[0], args[0]])
    args[-1] = torch.cat([args[-1], args[-1] * 2])
    result = check_paged(args, "padding rows")
    assert torch.equal(result[4:], torch.full_like(result[4:], 18.0))


def test_a_request_without_context_yields_zeros() -> None:
    result = check_paged(paged([0, 20, 0], [1, 1, 3]), "no context")
    assert torch.equal(result[0], torch.zeros_like(result[0]))
    assert torch.equal(result[2:], torch.zeros_like(result[2:]))
    assert result[1].abs().sum() > 0
    nothing_held = check_paged(paged([0, 0], [1, 1]), "no context anywhere")
    assert torch.equal(nothing_held, torch.zeros_like(nothing_held))


def test_fewer_keys_than_rows() -> None:
    """Cross-attention is not causal, so its rows need not be part of the context."""
    args = paged([3, 2], [5, 1], causal=False)
    check_paged(args, "cross-attention")


def test_decode_and_prefill_agree() -> None:
    """The same rows are computed as the prefill of one request and as its decode steps."""
    prefill = paged([37], [37], sinks=True)
    together = run(ops.paged_attention, tuple(prefill)).args[-1]
    for position in (0, 15, 16, 36):
        step = private(tuple(prefill))
        args = [
            step[0][position : position + 1],
            *step[1:4],
            torch.tensor([0, 1]),
            torch.tensor([position + 1]),
        ]
        args += [*step[6:-1], step[-1][:1]]
        ops.paged_attention(*args)
        torch.testing.assert_close(args[-1][0], together[position], rtol=1e-5, atol=1e-6)


def test_extreme_scores_do_not_overflow() -> None:
    args = paged([30, 30], [1, 4])
    args[0] = args[0] * 1e4
    assert torch.isfinite(check_paged(args, "large scores")).all()


def test_a_sink_takes_its_share_only_from_the_denominator() -> None:
    args = paged([12], [1], sinks=True)
    args[11] = torch.full((4,), 50.0)
    assert run(ops.paged_attention, tuple(args)).args[-1].abs().max() < 1e-6
    args[11] = torch.full((4,), -1e4)
    without = [*args[:11], None, *args[12:]]
    torch.testing.assert_close(
        run(ops.paged_attention, tuple(args)).args[-1], run(ops.paged_attention, tuple(without)).args[-1]
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_written_to_the_cache_and_read_back(dtype: torch.dtype) -> None:
    """kv_cache_write and paged_attention use the scale in the same way, so fp8 costs only precision."""
    source = space(torch.float32)
    key, value, query = (source.normal(24, 2, 16) for _ in range(3))
    cache = torch.zeros(8, 2, 4, 32).to(dtype)
    table = torch.randperm(8, generator=source.generator)[:6].to(torch.int32)[None]
    slots = torch.cat([block * 4 + torch.arange(4) for block in table[0].tolist()])
    k_scale, v_scale = 0.01, 3.0
    ops.kv_cache_write(key, value, cache[..., :16], cache[..., 16:], slots, k_scale, v_scale)
    out, start = torch.empty(24, 2, 16), torch.tensor([0, 24])
    ops.paged_attention(
        query, cache[..., :16], cache[..., 16:], table, start, torch.tensor([24]),
        0.25, True, 0, 0.0, None, None, k_scale, v_scale, out,
    )  # fmt: skip
    expected = varlen_expected((query, key, value, start, 0.25, True, 0, 0.0, None, None, torch.zeros_like(out)))
    step = {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2}[dtype]
    error = np.abs(exact(out) - expected)
    assert error.mean() < step / 2
    assert error.max() > 1e-5, "nothing was rounded: the cache was not used"


def test_heads_that_do_not_divide_are_refused() -> None:
    args = paged([3], [1], heads=3, kv_heads=2)
    with pytest.raises(OperatorError, match="3 query heads"):
        ops.paged_attention.reference(*args)
