"""Holds the cases of the LoRA kernels for compare_cpu_kernels.py: small batches of mixed adapters, no adapter, NaN."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SLOTS = 3
MIXED = (0, 2, -1, 1, 1, SLOTS, 0, 2, 2, 1 << 20, 0, 0, 1)
"""Slots, and numbers that are not slots."""


def lora_shapes() -> Iterator[str]:
    from compare_cpu_kernels import compare

    from vllm_backplane import ops

    for dtype in FLOATS:
        for adapters in {dtype, torch.float32}:
            for tokens, width, rank in (
                (0, 8, 4),
                (1, 1, 1),
                (2, 577, 3),
                (3, 17, 8),
                (5, 40, 13),
                (7, 50, 16),
                (4, 65, 32),
                (9, 31, 64),
                (33, 96, 6),
            ):
                indices = torch.tensor(list(islice(cycle(MIXED), tokens)), dtype=torch.int64)
                label = f"{tokens} tokens, {width} to {rank}, {dtype}, adapters of {adapters}"
                x = torch.randn(tokens, width).to(dtype)
                x[::4] = float("nan")
                a = (torch.randn(SLOTS, rank, width) / width**0.5).to(adapters)
                yield from compare(ops.lora_shrink, (x, a, indices.int(), 0.7), label)
                y, narrow = torch.randn(tokens, 700).to(dtype), torch.randn(tokens, rank)
                narrow[::5] = float("inf")
                b = (torch.randn(SLOTS, 603, rank) / rank**0.5).to(adapters)
                for offset, size, add in (
                    (0, None, True),
                    (97, 603, True),
                    (3, 257, True),
                    (5, 1, True),
                    (0, 5, False),
                ):
                    more = f"{label}, {size} columns from {offset} on, add {add}"
                    yield from compare(ops.lora_expand, (y, narrow, b, indices, offset, size, add), more)
    before = torch.get_num_threads()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        x, a = torch.randn(70, 576), torch.randn(SLOTS, 64, 576) / 24
        b, y = torch.randn(SLOTS, 1536, 64) / 8, torch.randn(70, 1536)
        indices = torch.tensor(list(islice(cycle(MIXED), 70)))
        yield from compare(ops.lora_shrink, (x, a, indices, 2.0), f"{threads} threads")
        yield from compare(ops.lora_expand, (y, x[:, :64], b, indices), f"{threads} threads")
    torch.set_num_threads(before)
