"""Holds cases of the expert kernels for compare_cpu_kernels.py: few or many tokens, invalid or repeated ids, NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lora_kernel_cases import FLOATS

SHAPES = ((0, 8, 4, 3, 2), (1, 33, 17, 5, 2), (3, 1, 1, 1, 1), (40, 64, 48, 8, 3), (200, 24, 40, 4, 4))
"""Tokens, hidden size, inner size, experts, experts per token."""


def expert_shapes() -> Iterator[str]:
    from compare_cpu_kernels import compare

    from vllm_backplane import ops
    from vllm_backplane.ops.moe import GATED, PLAIN

    for dtype in FLOATS:
        for shape in SHAPES:
            for activation in (*GATED, *PLAIN):
                label = f"{activation}, {shape}, {dtype}"
                yield from compare(ops.moe_experts, experts(*shape, activation, dtype), label, 1e-4)
    x, *rest = experts(6, 32, 16, 4, 2, "silu", torch.float32)
    x[2, 3], x[4, 0] = float("nan"), float("inf")
    yield from compare(ops.moe_experts, (x, *rest), "NaN and infinity", 1e-4)
    for n, top_k in ((1, 1), (7, 3), (64, 8), (256, 8)):
        logits = torch.randn(9, n).mul(3).round()  # many logits are equal
        logits[1, 0], logits[2] = float("nan"), -float("inf")
        logits[3, n // 2] = float("inf")
        for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
            for renormalize in (False, True):
                args = (logits, top_k, renormalize, scoring)
                yield from compare(ops.moe_route, args, f"{n} experts, {scoring}, {renormalize}", 1e-5)


def wrong_experts() -> list[tuple[Any, tuple[Any, ...], str]]:
    """Returns calls that raise an error, with a part of its text."""
    from vllm_backplane import ops

    good = experts(4, 8, 8, 3, 2, "silu", torch.float32)
    logits = torch.zeros(1, 8)
    return [
        (ops.moe_experts, (*good[:5], "silo"), "unknown activation"),
        (ops.moe_experts, (good[0][:, :7], *good[1:]), "does not fit"),
        (ops.moe_experts, (*good[:4], good[4][:3], "silu"), "ids of"),
        (ops.moe_experts, (*good, None, None, torch.zeros(1, dtype=torch.int32)), "is outside the expert map"),
        (ops.moe_route, (logits, 2, True, "sigmoyd"), "unknown scoring"),
        (ops.moe_route, (logits, 9, True, "softmax"), "top_k is 9"),
        (ops.moe_route, (logits, 2, True, "softmax", None, 3, 1), "3 groups"),
        (ops.moe_route, (logits, 2, True, "softmax", torch.zeros(7)), "bias has shape"),
    ]


def experts(
    tokens: int, hidden: int, inner: int, count: int, top_k: int, activation: str, dtype: torch.dtype
) -> tuple[Any, ...]:
    from vllm_backplane.ops.moe import PLAIN

    width = inner if activation in PLAIN else 2 * inner
    ids = torch.randint(-1, count + 1, (tokens, top_k), dtype=torch.int32)  # some ids repeat, some are of no expert
    return (
        torch.randn(tokens, hidden).to(dtype),
        (torch.randn(count, width, hidden) / hidden**0.5).to(dtype),
        (torch.randn(count, hidden, inner) / inner**0.5).to(dtype),
        torch.rand(tokens, top_k),
        ids,
        activation,
    )
