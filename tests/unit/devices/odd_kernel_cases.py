"""Holds cases with NaN, infinite and extreme numbers, and with very long contexts, for compare_cpu_kernels.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch
from lora_kernel_cases import FLOATS
from special_numbers import INF, NAN, special

SMALL = (NAN, INF, -INF, 0.0, -0.0, 6e-8, 1e-40)
LARGE = (65504.0, -3.3e38)
"""The second number is infinite in half precision, and its square in every dtype."""


def odd_rows(width: int, dtype: torch.dtype, alone: tuple[float, ...], throughout: tuple[float, ...]) -> torch.Tensor:
    """Returns rows of ordinary numbers with one odd number each, rows of one odd number, and a row of all kinds."""
    rows = torch.randn(len(alone) + len(throughout) + 1, width)
    for place, number in enumerate(alone):
        rows[place, place * 7 % width] = number
    for place, number in enumerate(throughout, len(alone)):
        rows[place] = number
    rows[-1] = torch.tensor(alone).repeat(width // len(alone) + 1)[:width]
    return rows.to(dtype)


def norms_of_odd_numbers() -> Iterator[str]:
    from compare_cpu_kernels import compare

    from vllm_backplane import ops

    every = SMALL + LARGE
    for dtype in FLOATS:
        for width in (1, 7, 33, 577):
            x = odd_rows(width, dtype, every, every)
            residual, everywhere = x.flip(0).contiguous(), special(5, width).to(dtype)
            for number, weight in enumerate((None, torch.randn(width).to(dtype), x[-1], x[-1].float())):
                label = f"odd numbers, {width} {dtype}, weight {number}"
                for given in (x, everywhere):
                    yield from compare(ops.rms_norm, (given, weight, 1e-6), label)
                yield from compare(ops.rms_norm, (x, weight, 1e-6, max(1, width // 2)), f"{label}, measured in part")
                yield from compare(ops.fused_add_rms_norm, (x, residual, weight, 1e-6), label)
                yield from compare(ops.fused_add_rms_norm, (x, x.float(), weight, 1e-6), f"{label}, mixed")
                if weight is not None:
                    yield from compare(ops.gemma_rms_norm, (x, weight, 1e-6), label)
                    yield from compare(ops.fused_add_gemma_rms_norm, (x, residual, weight, 1e-6), label)


def rotations_of_odd_numbers() -> Iterator[str]:
    """Yields the differences for odd numbers and odd angles, as in the table of a damaged model.

    A kernel may use a fused multiply-add, which does not round the product. So no two large numbers are combined here:
    if they cancelled, the remainder would depend on that rounding, and if both products overflowed, whether the result
    is infinite or NaN would.
    """
    from compare_cpu_kernels import compare

    from vllm_backplane import ops

    for dtype in FLOATS:
        for head, rotary in ((64, 64), (72, 70), (80, 32), (5, 2)):
            angles = torch.rand(9, rotary // 2) * 7
            plain = torch.cat((angles.cos(), angles.sin()), -1)
            damaged = odd_rows(rotary, torch.float32, (*SMALL, LARGE[0]), ())[:-1]
            for odd, table in ((SMALL + LARGE, plain), (SMALL, damaged)):
                x = odd_rows(3 * head, dtype, odd, SMALL)
                for given in (table, table.to(dtype)):
                    for neox in (True, False):
                        positions = torch.arange(len(x)) % len(table)
                        args = (positions, x, x[:, head:].clone(), given, head, neox)
                        label = f"odd numbers, {len(odd)} kinds, {head}/{rotary} {dtype} {given.dtype} {neox}"
                        yield from compare(ops.rotary_embedding, args, label)


def products_of_odd_numbers() -> Iterator[str]:
    """Yields the errors for odd numbers in a GEMM: one in the input must affect only its row, one in the weights only
    its column, and none the padding of a block."""
    from compare_cpu_kernels import compare

    from vllm_backplane import ops

    for dtype in FLOATS:
        for rows, inner, outer in ((1, 7, 3), (3, 64, 65), (5, 100, 33), (18, 577, 130), (130, 96, 40)):
            x, weight = torch.randn(rows, inner), torch.randn(outer, inner) / inner**0.5
            for place, number in enumerate((NAN, INF, -INF)[:rows]):
                x[place, place * 5 % inner] = number
            damaged = weight.clone()
            for place, number in enumerate((INF, NAN, -INF)[: outer - 1]):
                damaged[place, (place * 3 + 1) % inner] = number
            for made, given in (("odd input", weight), ("odd input and weight", damaged)):
                left, right = x.to(dtype), given.to(dtype)
                label = f"{made}, {rows} x {inner} -> {outer}, {dtype}"
                yield from compare(ops.linear, (left, right), label)
                yield from compare(ops.logits, (left, right), label)
                yield from compare(ops.blocked_linear, partial(with_blocks, left, right), label)


def with_blocks(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the arguments of `blocked_linear` for the selected instruction set."""
    from vllm_backplane.devices.cpu import native

    return x, native.to_blocks(weight), len(weight)


def long_contexts() -> Iterator[str]:
    """Yields the differences for decode steps and chunks of prompts over contexts that kernels split many times."""
    from compare_cpu_kernels import compare, paged

    from vllm_backplane import ops

    generator, lengths = random.Random(5), [8192, 32_769]
    half, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for dtype, stored in ((torch.float32, torch.float32), (half, half), (half, fp8)):
        for rows in ([1, 1], [7, 40]):
            args = paged(
                generator, lengths, rows, heads=4, kv_heads=2, head=16, value_head=16, block_size=64, dtype=dtype,
                stored=stored,
            )  # fmt: skip
            yield from compare(ops.paged_attention, args, f"{rows} rows of {lengths}, {dtype} stored as {stored}")
