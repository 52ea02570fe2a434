"""Holds cases of attention over keys and values that are NaN or infinite, for compare_cpu_kernels.py.

Such a value must reach the results of the queries that see it, and no others: neither earlier rows of the same prompt,
nor rows whose window excludes it, nor other requests. Both the kernels and the references are checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from special_numbers import INF, NAN

KEYS, VALUES = 1, 2
"""Indices of the arguments, the same for both operators."""
FEW = ((1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1))
MANY = ((2, 4), (9, 1), (9, 3), (40, 2))
"""Rows, and query heads per key head. Their product is the number of queries that a kernel takes together; those in FEW
are at most four."""
STORED = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@contextmanager
def spoilt(held: torch.Tensor, number: torch.Tensor) -> Iterator[None]:
    """Replaces one number of one position, in every head, inside the context."""
    before = held.clone()
    held.copy_(number.expand(held.shape).to(held.dtype))
    yield
    held.copy_(before)


def sees(at: int, position: int, window: int, causal: bool) -> bool:
    return (position <= at or not causal) and (window <= 0 or abs(at - position) < window)


def wrong_rows(
    operator: Any, args: tuple[Any, ...], held: list[torch.Tensor], seeing: list[bool], choose: Callable[[Any], Any]
) -> Iterator[str]:
    """Yields the errors if one key or value is NaN or infinite; `seeing` has for every row whether it sees it."""
    from compare_cpu_kernels import compare, each_isa

    side, chosen = choose(((KEYS, NAN), (KEYS, INF), (KEYS, -INF), (VALUES, NAN), (VALUES, INF), (VALUES, -INF)))
    number = torch.tensor(chosen).to(held[0].dtype).float()  # a dtype may have no infinities
    label = f"{tuple(args[0].shape)}, {held[0].dtype}, {number.item()} among {'keys' if side == KEYS else 'values'}"
    spoil = partial(spoilt, held[side - KEYS], number)
    for error in wrong_rows_of(operator.reference, args, spoil, seeing, number, side):
        yield f"{operator.name} (reference): {label}: {error}"
    for isa in each_isa():
        for error in wrong_rows_of(operator.call, args, spoil, seeing, number, side):
            yield f"{operator.name} ({isa}): {label}: {error}"
    with spoil():
        yield from compare(operator, args, label, 1e-5)


def wrong_rows_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    spoil: Callable[[], AbstractContextManager[None]],
    seeing: list[bool],
    number: torch.Tensor,
    side: int,
) -> Iterator[str]:
    """Yields the errors of one implementation."""
    from compare_cpu_kernels import outcome

    written, place, bound = [len(args) - 1], torch.tensor(seeing), TOLERANCE[args[0].dtype]
    before = outcome(function, args, written)[0][: len(place)]
    with spoil():
        after = outcome(function, args, written)[0][: len(place)]
    if not torch.allclose(after[~place].float(), before[~place].float(), rtol=bound, atol=bound):
        yield "rows change that do not see it"
    marked = after[place][..., 0] if side == VALUES else after[place]
    is_marked = bool(number.isnan() if side == KEYS else ~number.isfinite())
    if is_marked and marked.isfinite().any():
        yield "rows that see it do not change"


def attention_of_odd_numbers() -> Iterator[str]:
    yield from paged_odd_numbers()
    yield from ragged_odd_numbers()


def paged_odd_numbers() -> Iterator[str]:
    """Yields the errors for contexts of one tile, of several, behind a window, and long ones that a kernel splits and
    merges."""
    from compare_cpu_kernels import paged

    from vllm_backplane import ops

    generator = random.Random(6)
    for stored in STORED:
        dtype = stored if stored.itemsize > 1 else torch.bfloat16
        for rows, group in (*FEW, *MANY):
            for length, window in ((rows, 0), (rows + 90, 0), (rows + 90, 7), (1500, 0)):
                lengths, other = [length, rows + 20], [False] * rows
                args = paged(
                    generator, lengths, [rows, rows], heads=2 * group, kv_heads=2, head=16, value_head=24,
                    block_size=16, dtype=dtype, stored=stored, window=window,
                )  # fmt: skip
                first = length - rows
                position = generator.choice((length - 1, first + rows // 2, max(0, first - 2)))
                block = int(args[3][0, position // 16])
                parts = [args[side][block, :, position % 16, 0] for side in (KEYS, VALUES)]
                seeing = [sees(first + row, position, window, True) for row in range(rows)]
                yield from wrong_rows(ops.paged_attention, args, parts, [*seeing, *other], generator.choice)


def ragged_odd_numbers() -> Iterator[str]:
    from vllm_backplane import ops

    generator = random.Random(7)
    for dtype in TOLERANCE:
        for rows, group in (*FEW, *MANY, (130, 1)):
            for causal, window in ((True, 0), (True, 7), (False, 7)):
                query = torch.randn(2 * rows, 2 * group, 16).to(dtype)
                key, value = torch.randn(2 * rows, 2, 16).to(dtype), torch.randn(2 * rows, 2, 24).to(dtype)
                starts = torch.tensor([0, rows, 2 * rows], dtype=torch.int32)
                out = torch.full((2 * rows, 2 * group, 24), 9.0).to(dtype)
                args = (query, key, value, starts, 0.25, causal, window, 0.0, None, None, out)
                position = generator.randrange(rows)
                parts = [side[position, :, 0] for side in (key, value)]
                seeing = [sees(row, position, window, causal) for row in range(rows)]
                yield from wrong_rows(ops.varlen_attention, args, parts, [*seeing, *[False] * rows], generator.choice)


def long_prompts() -> Iterator[str]:
    """Yields the errors of attention without a cache, with more scores than the reference computes at once."""
    from compare_cpu_kernels import compare

    from vllm_backplane import ops

    for dtype in (torch.float32, torch.bfloat16):
        for causal in (True, False):
            query, key, value = (torch.randn(3001, heads, 16).to(dtype) for heads in (2, 1, 1))
            starts = torch.tensor([0, 1, 3001], dtype=torch.int32)
            args = (query, key, value, starts, 0.25, causal, 0, 0.0, None, None, torch.empty_like(query))
            yield from compare(ops.varlen_attention, args, f"3000 rows, {dtype}, causal {causal}", 1e-5)
