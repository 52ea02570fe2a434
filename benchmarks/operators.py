"""Compares the C++ kernels of the cpu device with the references they replace, operator by operator.

    python benchmarks/operators.py                  # one thread, bfloat16, shapes of SmolLM2 and of an 8B model
    python benchmarks/operators.py --json           # the same as JSON
    python benchmarks/operators.py --only paged_attention --dtype float32 --threads 4

Kernel and reference run in turns on the same arguments, so that other load on the machine affects both. The table shows
medians. The kernel is called through PyTorch's dispatcher, as a model calls it.

For attention the table also shows the rate at which keys and values are read, each counted once, and the rate of
multiply-accumulates, without masked ones, both as shares of the machine's limits. The limits are measured at the same
time with as many threads: a loop that only reads memory, and float32 multiply-adds without memory accesses. All calls
read the same keys, so short contexts come from the caches. On a processor with bfloat16 tiles, prefill may exceed the
float32 limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.quantized_linear import Limits
from vllm_backplane import ops
from vllm_backplane.devices.cpu import native
from vllm_backplane.ops.operator import Operator
from vllm_backplane.ops.resolution import has_kernel

BLOCK_SIZE = 16
CHANGE_LOGITS = (ops.top_k_top_p_mask, ops.min_p_mask, ops.apply_penalties, ops.allowed_tokens_mask)


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds the sizes of a model's layers."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Case:
    """Holds an operator with its arguments."""

    operator: Operator
    label: str
    args: tuple[Any, ...]
    size: int = 0
    """Bytes that must be read; 0: shares of the machine's limits are not reported."""
    macs: int = 0
    """Multiply-accumulates that must be done."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Holds the measured times of a case."""

    operator: str
    label: str
    kernel_us: float
    reference_us: float
    bytes_per_second: float = 0.0
    macs_per_second: float = 0.0
    memory_limit: float = 0.0
    """Bytes per second that the machine can read; 0: not measured."""
    mac_limit: float = 0.0
    """Multiply-accumulates per second that the machine can do; 0: not measured."""

    @property
    def ratio(self) -> float:
        return self.reference_us / self.kernel_us

    @property
    def shares(self) -> str:
        if not self.memory_limit:
            return ""
        read, done = self.bytes_per_second, self.macs_per_second
        return (
            f"  {read / 1e9:.1f} GB/s, {read / self.memory_limit:.0%} of the memory limit;"
            f" {done / 1e9:.1f} GMAC/s, {done / self.mac_limit:.0%} of the arithmetic limit"
        )


SHAPES = (
    Shape("SmolLM2", 576, 1536, 9, 3, 64, 49152),
    Shape("8B", 4096, 14336, 32, 8, 128, 128256),
)


def attention(shape: Shape, requests: int, rows: int, context: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns arguments of paged_attention in which each request has `rows` new tokens at the end of `context`."""
    columns = -(-context // BLOCK_SIZE)
    cache = torch.randn(requests * columns, shape.kv_heads, BLOCK_SIZE, 2 * shape.head).to(dtype)
    table = torch.randperm(requests * columns).to(torch.int32).view(requests, columns)
    return (
        torch.randn(requests * rows, shape.heads, shape.head).to(dtype),
        cache[..., : shape.head],
        cache[..., shape.head :],
        table,
        torch.arange(0, requests * rows + 1, rows, dtype=torch.int32),
        torch.full((requests,), context, dtype=torch.int32),
        shape.head**-0.5,
        True,
        0,
        0.0,
        None,
        None,
        1.0,
        1.0,
        torch.empty(requests * rows, shape.heads, shape.head, dtype=dtype),
    )


def work_of(shape: Shape, requests: int, rows: int, context: int, dtype: torch.dtype, causal: bool = True) -> list[int]:
    """Returns the bytes of keys and values, and the multiply-accumulates, of attention."""
    keys = rows * (context - rows) + rows * (rows + 1) // 2 if causal else rows * context
    size = requests * context * shape.kv_heads * 2 * shape.head * dtype.itemsize
    return [size, requests * keys * shape.heads * 2 * shape.head]


def cases(shape: Shape, dtype: torch.dtype) -> Iterator[Case]:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size).to(dtype)

    for tokens in (1, 128):
        weight = normal(shape.hidden)
        x = normal(tokens, shape.hidden)
        yield Case(ops.rms_norm, f"{tokens} tokens", (x, weight, 1e-5))
        yield Case(ops.fused_add_rms_norm, f"{tokens} tokens", (x, normal(tokens, shape.hidden), weight, 1e-5))
        yield Case(ops.silu_and_mul, f"{tokens} tokens", (normal(tokens, 2 * shape.inner),))
        yield Case(ops.gelu_and_mul, f"{tokens} tokens", (normal(tokens, 2 * shape.inner), "tanh"))
        fused = normal(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head)
        sizes = [shape.heads * shape.head, shape.kv_heads * shape.head, shape.kv_heads * shape.head]
        query, key, value = fused.split(sizes, -1)
        angles = torch.outer(torch.arange(2048.0), 10000.0 ** -torch.linspace(0, 1, shape.head // 2))
        table, positions = torch.cat((angles.cos(), angles.sin()), -1).to(dtype), torch.arange(tokens) + 100
        yield Case(ops.rotary_embedding, f"{tokens} tokens", (positions, query, key, table, shape.head, True))
        cache = normal(64, shape.kv_heads, BLOCK_SIZE, 2 * shape.head)
        split = (tokens, shape.kv_heads, shape.head)
        halves = (cache[..., : shape.head], cache[..., shape.head :])
        slots = torch.randperm(64 * BLOCK_SIZE)[:tokens]
        yield Case(
            ops.kv_cache_write, f"{tokens} tokens", (key.reshape(split), value.reshape(split), *halves, slots, 1.0, 1.0)
        )
        starts, blocks = torch.tensor([0, tokens], dtype=torch.int32), torch.arange(64, dtype=torch.int32).view(1, 64)
        yield Case(
            ops.compute_slot_mapping,
            f"{tokens} tokens",
            (starts, positions, blocks, torch.empty(tokens, dtype=torch.int64), BLOCK_SIZE, -1),
        )
    experts, inner = 8, shape.inner // 4
    w13, w2 = normal(experts, 2 * inner, shape.hidden), normal(experts, shape.hidden, inner)
    for tokens in (1, 16, 128):
        scores = torch.randn(tokens, experts)
        weights, ids = ops.moe_route.reference(scores, 2, True, "softmax")
        yield Case(ops.moe_route, f"{tokens} tokens, 2 of {experts}", (scores, 2, True, "softmax"))
        label = f"{tokens} tokens, 2 of {experts} x {inner}"
        yield Case(ops.moe_experts, label, (normal(tokens, shape.hidden), w13, w2, weights, ids, "silu"))
    decoding = ((1, 1, 128), (1, 1, 1024), (1, 1, 8192), (8, 1, 512), (1, 4, 1024))
    for requests, rows, context in (*decoding, (1, 128, 128), (1, 512, 512)):
        label, sizes = f"{requests} x {rows} rows over {context}", (requests, rows, context, dtype)
        yield Case(ops.paged_attention, label, attention(shape, *sizes), *work_of(shape, *sizes))
    rows = 256
    q, k = normal(rows, shape.heads, shape.head), normal(rows, shape.kv_heads, shape.head)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    yield Case(
        ops.varlen_attention,
        f"1 x {rows} rows",
        (q, k, normal(*k.shape), starts, shape.head**-0.5, False, 0, 0.0, None, None, torch.empty_like(q)),
        *work_of(shape, 1, rows, rows, dtype, causal=False),
    )
    for requests in (1, 8):
        logits = torch.randn(requests, shape.vocabulary) * 3
        top_k, top_p = torch.full((requests,), 50, dtype=torch.int32), torch.full((requests,), 0.9)
        yield Case(ops.greedy_argmax, f"{requests} rows", (logits,))
        yield Case(ops.top_k_top_p_mask, f"{requests} rows, k 50", (logits, top_k, None))
        yield Case(ops.top_k_top_p_mask, f"{requests} rows, k 50, p 0.9", (logits, top_k, top_p))
        yield Case(ops.top_k_top_p_mask, f"{requests} rows, p 0.9", (logits, None, top_p))
        yield Case(ops.min_p_mask, f"{requests} rows, 0.05", (logits, torch.full((requests,), 0.05)))
        ids = torch.randint(shape.vocabulary, (requests, 512))
        penalties = (torch.full((requests,), 0.1), torch.full((requests,), 0.1), torch.full((requests,), 1.1))
        yield Case(ops.apply_penalties, f"{requests} rows, 512 + 512 ids", (logits, ids, ids, *penalties))
        few = torch.zeros(requests, -(-shape.vocabulary // 32), dtype=torch.int32)
        few[:, 7] = 5
        yield Case(ops.allowed_tokens_mask, f"{requests} rows, 2 allowed", (logits, few))
        yield Case(ops.allowed_tokens_mask, f"{requests} rows, 2 forbidden", (logits, ~few))
        yield Case(ops.sample_by_race, f"{requests} rows", (logits.softmax(-1), torch.rand_like(logits) + 1e-6))


def timed(call: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def measure(case: Case, rounds: int, seconds: float, limits: Limits) -> Timing:
    # Operators write in place, which changes values in repeated calls and not the amount of work. Logits are an
    # exception: they would stay masked after the first call, so both sides restore them before each call.
    fresh = case.args
    restore = None
    if case.operator in CHANGE_LOGITS:
        kept = case.args[0].clone()
        fresh = (kept.clone(), *case.args[1:])
        restore = (fresh[0], kept)

    def once(function: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> None:
            if restore is not None:
                restore[0].copy_(restore[1])
            function(*fresh)

        return call

    sides = once(case.operator.call), once(case.operator.reference)
    counts = []
    for side in sides:
        side()
        counts.append(max(1, int(seconds / rounds / max(1e-6, timed(side, 1) / 1e6))))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for results, side, count in zip(times, sides, counts, strict=True):
            results.append(timed(side, count))
    kernel_us, reference_us = (statistics.median(results) for results in times)
    if not case.macs:
        return Timing(case.operator.name, case.label, kernel_us, reference_us)
    rates = (case.size / kernel_us * 1e6, case.macs / kernel_us * 1e6)
    measured = (limits.bytes_per_second(), limits.float_macs_per_second())
    return Timing(case.operator.name, case.label, kernel_us, reference_us, *rates, *measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=9, help="turns of kernel and reference per case")
    parser.add_argument("--seconds", type=float, default=0.3, help="approximate time per kernel or reference and case")
    parser.add_argument("--only", action="append", default=[], help="an operator; may be given several times")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    native.load()
    fault = native.fault()
    if fault is not None:
        raise SystemExit(": ".join(fault))
    limits = Limits(options.threads, time.perf_counter)
    results: dict[str, list[Timing]] = {}
    for shape in SHAPES:
        if not options.json:
            print(f"\n{shape.name}, {options.dtype}, {options.threads} thread(s); microseconds per call")
            print(f"{'operator':<22}{'':<28}{'kernel':>10}{'reference':>12}{'ratio':>8}")
        for case in cases(shape, getattr(torch, options.dtype)):
            if options.only and case.operator.name not in options.only:
                continue
            if not has_kernel(case.operator.name, "CPU"):
                raise SystemExit(f"{case.operator.name} has no kernel in {native.LIBRARY_NAME}; rebuild it")
            timing = measure(case, options.rounds, options.seconds, limits)
            results.setdefault(shape.name, []).append(timing)
            if not options.json:
                print(
                    f"{timing.operator:<22}{timing.label:<28}{timing.kernel_us:>10.1f}{timing.reference_us:>12.1f}"
                    f"{timing.ratio:>8.1f}{timing.shares}",
                    flush=True,
                )
    if options.json:
        rows = {name: [{**asdict(t), "ratio": t.ratio} for t in timings] for name, timings in results.items()}
        print(json.dumps({"dtype": options.dtype, "threads": options.threads, "results": rows}, indent=2))


if __name__ == "__main__":
    main()
