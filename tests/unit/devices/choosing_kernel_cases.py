"""Holds the cases of the sampling kernels for compare_cpu_kernels.py: penalties, masks, random draw, at odd sizes.

Results must be equal to the last bit, so that a seed gives the same tokens with the kernels as with the references.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lora_kernel_cases import FLOATS
from special_numbers import INF, NAN

SIZES = (1, 5, 31, 32, 33, 100, 2047, 2049, 70_001)
ROWS = 6
SHARES = (0.0, 0.1, 0.1, 0.1, 0.3, 0.02), (1.0, 0.5, NAN, 0.0, 1e-30, NAN), (2.0, -1.0, INF, 0.5, 1.0, 1.0)
"""min_p of each row: usual values, and values that a server would reject."""


def odd_logits(size: int) -> torch.Tensor:
    logits = torch.randn(ROWS, size) * 3
    logits[1, size // 2], logits[2, size // 3], logits[3] = NAN, INF, -INF
    logits[4, torch.rand(size) < 0.5] = -INF
    return logits


def spread(rows: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers with a stride of two."""
    return torch.stack((rows, rows), -1)[..., 0]


def forbidden_tokens() -> Iterator[str]:
    from compare_cpu_kernels import compare

    from vllm_backplane import ops

    for size in SIZES:
        logits, words = odd_logits(size), -(-size // 32)
        for dtype in FLOATS:
            for count in sorted({words, max(1, words - 1), words + 2}):
                allowed = torch.randint(-(1 << 31), 1 << 31, (ROWS, count)).int()
                allowed[0], allowed[1] = -1, 0
                label = f"{size} tokens, {count} words, {dtype}"
                for given, mask in ((logits, allowed), (spread(logits), spread(allowed)), (logits[:0], allowed[:0])):
                    yield from compare(ops.allowed_tokens_mask, (given.to(dtype), mask), label, 0.0)
        for shares in SHARES:
            min_p = torch.tensor(shares)
            for given, share in ((logits, min_p), (spread(logits), min_p[:, None]), (logits[5:], min_p[5:])):
                yield from compare(ops.min_p_mask, (given, share), f"{size} tokens, {shares}")
        equal = logits.bfloat16().float()  # of several equally likely best tokens, all stay
        yield from compare(ops.min_p_mask, (equal, torch.ones(ROWS)), f"{size} tokens, coarse")


def penalized_tokens() -> Iterator[str]:
    from compare_cpu_kernels import compare

    from vllm_backplane import ops

    for size in SIZES:
        logits = odd_logits(size)
        for prompt, output in ((0, 0), (9, 0), (0, 7), (300, 120)):
            ids = [torch.randint(-2, size + 2, (ROWS, length)) for length in (prompt, output)]
            penalties = torch.rand(ROWS) * 4 - 2, torch.rand(ROWS) * 4 - 2, torch.rand(ROWS) + 0.5
            label = f"{size} tokens, {prompt} in the prompt, {output} written"
            yield from compare(ops.apply_penalties, (logits, *ids, *penalties), label, 0.0)
            apart = [spread(one.int()) for one in ids]
            yield from compare(ops.apply_penalties, (spread(logits), *apart, *penalties), f"{label}, apart", 0.0)
            one_row = (row[2:3] for row in (logits, *ids, *penalties))
            yield from compare(ops.apply_penalties, (*one_row,), f"{label}, one row", 0.0)


def drawn_tokens() -> Iterator[str]:
    from compare_cpu_kernels import compare

    from vllm_backplane import ops

    before = torch.get_num_threads()
    for size in SIZES:
        probs, noise = (torch.randn(ROWS, size) * 3).softmax(-1), torch.empty(ROWS, size).exponential_()
        probs[0], noise[0] = 0.25, 1.0  # all are equal, so the first is drawn
        probs[1, size // 2], noise[2, size // 3], noise[4, size // 2 :] = NAN, 0.0, INF
        probs[3, size // 2 :] = noise[3, size // 2 :] = 0.0
        for given in (noise, noise.double(), spread(noise), noise.t().contiguous().t()):
            yield from compare(ops.sample_by_race, (probs, given), f"{size} tokens, {given.dtype} {given.stride()}")
        for threads in (1, 3):
            torch.set_num_threads(threads)
            row = (spread(probs)[5:], noise[5:])
            yield from compare(ops.sample_by_race, row, f"one row of {size}, {threads} threads")
        torch.set_num_threads(before)


def wrong_choices() -> list[tuple[Any, tuple[Any, ...], str]]:
    """Returns calls that raise an error, with a part of its text."""
    from vllm_backplane import ops

    logits, ids, one = torch.zeros(2, 40), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2)
    return [
        (ops.sample_by_race, (logits, logits[:, 1:]), "noise has shape"),
        (ops.sample_by_race, (logits.half(), logits), "float32"),
        (ops.min_p_mask, (logits, torch.ones(3)), "min_p"),
        (ops.min_p_mask, (logits.double(), one), "float32"),
        (ops.allowed_tokens_mask, (logits, torch.ones(1, 2).int()), "mask"),
        (ops.allowed_tokens_mask, (logits, ids), "int32"),
        (ops.apply_penalties, (logits, ids[:1], ids, one, one, one), "ids have shape"),
        (ops.apply_penalties, (logits, ids.float(), ids, one, one, one), "integers"),
        (ops.apply_penalties, (logits, ids, ids, one[:1], one, one), "penalty"),
    ]
