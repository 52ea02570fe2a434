"""Compares the C++ kernels of the cpu device with the references; test_cpu_kernels.py runs this script.

Kernels run with every instruction set of the machine. The references run once.

python compare_cpu_kernels.py                          # prints the differences, by part, as JSON
python compare_cpu_kernels.py tests/unit/ops -q        # runs tests with the kernels instead of the references
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from choosing_kernel_cases import drawn_tokens, forbidden_tokens, penalized_tokens, wrong_choices
from expert_kernel_cases import expert_shapes, wrong_experts
from lora_kernel_cases import FLOATS, lora_shapes
from odd_attention_cases import attention_of_odd_numbers, long_prompts
from odd_kernel_cases import long_contexts, norms_of_odd_numbers, products_of_odd_numbers, rotations_of_odd_numbers
from special_numbers import special

OPERATOR_TESTS = Path(__file__).resolve().parents[1] / "ops"
NAN, INF = float("nan"), float("inf")
FLOAT32_BOUND = 4e-6  # for dot products of some hundred terms, summed in another order
ISAS = {"base": 0, "avx2": 1, "avx512": 2}
"""Instruction sets by the library's numbers; processors other than x86 have the first only."""
EXPECTED_KERNELS = {
    "allowed_tokens_mask", "apply_penalties", "blocked_linear", "compute_slot_mapping", "fatrelu_and_mul",
    "fused_add_gemma_rms_norm", "fused_add_rms_norm", "gelu", "gelu_and_mul", "gelu_fast", "gelu_new",
    "gemma_rms_norm", "greedy_argmax", "kv_cache_write", "kv_cache_zero_blocks", "linear", "logits", "lora_expand",
    "lora_shrink", "min_p_mask", "moe_experts", "moe_route", "mul_and_silu", "paged_attention", "quantized_linear",
    "quick_gelu", "relu2", "rms_norm", "rotary_embedding", "sample_by_race", "silu_and_mul",
    "silu_and_mul_with_clamp", "swigluoai_and_mul", "tally_values", "top_k_top_p_mask", "varlen_attention",
}  # fmt: skip

Report = dict[str, list[str]]


def report() -> Report:
    """Returns the failures of every part, and under "instruction sets" the names of those that the machine has."""
    sys.path.insert(0, str(OPERATOR_TESTS))
    for impossible in (-1, 3, 99):
        assert force_isa(impossible) == -1
    return {"instruction sets": list(each_isa()), **{part.__name__: list(part()) for part in PARTS}}


def force_isa(level: int) -> int:
    from vllm_backplane.devices.cpu import native

    return int(native.library().backplane_cpu_force_isa(level))


def each_isa() -> Iterator[str]:
    """Selects one instruction set of the machine after the other, the best last, and yields their names."""
    for name, level in ISAS.items():
        if force_isa(level) == level:
            yield name


def outcome(function: Callable[..., Any], args: tuple[Any, ...], written: list[int]) -> list[torch.Tensor]:
    from operator_checks import as_tuple, private

    mine = private(args)
    returned = as_tuple(function(*mine))
    return [t for t in (*returned, *(mine[i] for i in written if i < len(mine))) if isinstance(t, torch.Tensor)]


def compare(
    operator: Any, args: tuple[Any, ...] | Callable[[], tuple[Any, ...]], label: str, bound: float = FLOAT32_BOUND
) -> Iterator[str]:
    """Yields the differences between kernel and reference: dtypes, strides, and values beyond the tolerance.

    The tolerance is the operator's; for float32 it is `bound`. If the memory layout of an argument depends on the
    instruction set, `args` is a function, and the reference is called once for each layout.
    """
    from operator_checks import written

    positions = written(operator)
    if callable(args):
        for isa in each_isa():
            expected = outcome(operator.reference, args(), positions)
            yield from differences(operator, args(), expected, f"{operator.name} ({isa}): {label}", bound)
    else:
        expected = outcome(operator.reference, args, positions)
        for isa in each_isa():
            yield from differences(operator, args, expected, f"{operator.name} ({isa}): {label}", bound)


def differences(
    operator: Any, args: tuple[Any, ...], expected: list[torch.Tensor], label: str, bound: float
) -> Iterator[str]:
    """Yields the differences between the kernel, with the selected instruction set, and `expected`."""
    from operator_checks import written

    from vllm_backplane.ops.operator import EXACT, Tolerance

    actual = outcome(operator.call, args, written(operator))
    if len(actual) != len(expected):
        yield f"{label}: {len(actual)} results, not {len(expected)}"
    for place, (left, right) in enumerate(zip(actual, expected, strict=False)):
        if left.dtype != right.dtype or left.shape != right.shape:
            yield f"{label}: result {place} is {left.dtype} {left.shape}, not {right.dtype} {right.shape}"
            continue
        if left.numel() and left.stride() != right.stride():
            yield f"{label}: result {place} has strides {left.stride()}, not {right.stride()}"
        tolerance = operator.tolerances.get(left.dtype, EXACT)
        if left.dtype == torch.float32 and tolerance.rtol > 0:
            tolerance = Tolerance(bound, bound)
        if left.dtype.itemsize == 1:
            tolerance = EXACT  # scales are divided by, on both sides
        try:
            torch.testing.assert_close(
                left.double(), right.double(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
            )
        except AssertionError as error:
            yield f"{label}: result {place}: {' '.join(str(error).split())}"


def kernels() -> list[Any]:
    from vllm_backplane.ops.operator import declared
    from vllm_backplane.ops.resolution import has_kernel

    return [operator for name, operator in declared().items() if has_kernel(name, "CPU")]


def over_samples() -> Iterator[str]:
    from operator_checks import restrided, samples

    found = {operator.name for operator in kernels()}
    if found != EXPECTED_KERNELS:
        yield f"kernels: {sorted(found ^ EXPECTED_KERNELS)} are there and not expected, or the other way round"
    for operator in kernels():
        for dtype in operator.dtypes:
            for sample in samples(operator, dtype):
                yield from compare(operator, sample.args, f"{sample.label}, {dtype}", 1e-5)
                spread = tuple(restrided(a) if isinstance(a, torch.Tensor) else a for a in sample.args)
                yield from compare(operator, spread, f"{sample.label}, {dtype}, spread", 1e-5)


WIDTHS = (1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 48, 72, 80, 96, 577, 4096)


def norm_shapes() -> Iterator[str]:
    from vllm_backplane import ops

    for dtype in FLOATS:
        for width in WIDTHS:
            x, residual = torch.randn(3, width).to(dtype), torch.randn(3, width).to(dtype)
            for weight in (None, torch.randn(width).to(dtype), torch.randn(width), torch.randn(width).bfloat16()):
                label = f"{width} {dtype} weight {None if weight is None else weight.dtype}"
                measured = max(1, width - width // 3)
                yield from compare(ops.rms_norm, (x, weight, 1e-6), label)
                yield from compare(ops.fused_add_rms_norm, (x, residual, weight, 1e-6, measured), label)
                yield from compare(ops.fused_add_rms_norm, (x, residual.float(), weight, 1e-6), f"{label}, mixed")
                if weight is not None:
                    yield from compare(ops.gemma_rms_norm, (x, weight, 1e-6), label)
                    yield from compare(ops.fused_add_gemma_rms_norm, (x, residual, weight, 1e-6), label)
        fused = torch.randn(5, 7 * 24).to(dtype)
        weight = torch.randn(24).to(dtype)
        heads = fused[:, 24:120].view(5, 4, 24)
        for label, view in (
            ("heads of a slice", heads),
            ("transposed", heads.transpose(0, 1)),
            ("four dimensions", fused.view(5, 7, 24).transpose(0, 1).reshape(7, 5, 1, 24).transpose(1, 2)),
            ("columns", torch.randn(24, 6).to(dtype).t()),
            ("expanded", torch.randn(1, 24).to(dtype).expand(4, 24)),
            ("one row", torch.randn(24).to(dtype)),
        ):
            yield from compare(ops.rms_norm, (view, weight, 1e-6), f"{label} {dtype}")
            if label != "expanded":
                yield from compare(ops.fused_add_rms_norm, (view, view, weight, 1e-6), f"{label} {dtype}")


def activation_shapes() -> Iterator[str]:
    from vllm_backplane import ops

    gated: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (ops.silu_and_mul, ()), (ops.mul_and_silu, ()), (ops.gelu_and_mul, ("none",)), (ops.gelu_and_mul, ("tanh",)),
        (ops.fatrelu_and_mul, (0.3,)), (ops.silu_and_mul_with_clamp, (2.0, 1.3, 0.5)),
        (ops.swigluoai_and_mul, (1.702, 2.0)),
    )  # fmt: skip
    plain: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (ops.gelu, ("none",)), (ops.gelu, ("tanh",)), (ops.gelu_new, ()), (ops.gelu_fast, ()), (ops.quick_gelu, ()),
        (ops.relu2, ()),
    )  # fmt: skip
    for dtype in FLOATS:
        for width in WIDTHS:
            x = (torch.randn(3, 2 * width) * 4).to(dtype)
            for operator, rest in (*gated, *plain):
                yield from compare(operator, (x, *rest), f"{width} {dtype} {rest}")
        odd = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 90.0, -90.0, 20.0, -20.0, 1e-30, 0.62, 0.63, -0.62]).to(dtype)
        for operator, rest in plain:
            yield from compare(operator, (odd, *rest), f"special numbers {dtype} {rest}")
        for operator, rest in gated:
            x = torch.cat((odd.repeat_interleave(len(odd)), odd.repeat(len(odd))))
            yield from compare(operator, (x, *rest), f"special numbers {dtype} {rest}")


def rotary_shapes() -> Iterator[str]:
    from vllm_backplane import ops

    for dtype in FLOATS:
        for table_dtype in FLOATS:
            for head, rotary in ((64, 64), (80, 32), (96, 96), (72, 70), (5, 2), (128, 126), (16, 0)):
                for neox in (True, False):
                    angles = torch.rand(50, rotary // 2) * 7
                    table = torch.cat((angles.cos(), angles.sin()), -1).to(table_dtype)
                    fused = torch.randn(6, 7 * head).to(dtype)
                    query, key = fused[:, : 4 * head], fused[:, 4 * head : 6 * head]
                    args = (torch.randint(50, (6,)), query, key, table, head, neox)
                    yield from compare(ops.rotary_embedding, args, f"{head}/{rotary} {dtype} {table_dtype} {neox}")
                    apart = torch.randn(6, head, 3).to(dtype).transpose(1, 2)
                    args = (torch.randint(50, (2, 3)).int(), apart, None, table, head, neox)
                    yield from compare(ops.rotary_embedding, args, f"last dimension apart {dtype} {table_dtype} {neox}")


def cache_shapes() -> Iterator[str]:
    from vllm_backplane import ops

    storage = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype in FLOATS:
        for stored in storage:
            for head, value_head, inside in ((64, 64, False), (80, 72, True), (5, 3, False), (1, 1, True)):
                shape = (5, 4, 3, head + value_head) if inside else (5, 3, 4, head + value_head)
                cache = torch.randn(shape).to(stored)
                cache = cache.transpose(1, 2) if inside else cache
                key, value = special(7, 3, head).to(dtype), special(7, 3, value_head).to(dtype)
                slots = torch.tensor([3, -1, 19, 0, -1, 7])
                for scales in ((1.0, 1.0), (0.37, 3.0)):
                    args = (key, value, cache[..., :head], cache[..., head:], slots, *scales)
                    yield from compare(ops.kv_cache_write, args, f"{dtype} into {stored} {head} {inside} {scales}", 0.0)
            apart = torch.randn(5, 8, 4, 3).to(stored).transpose(1, 3)
            key = torch.randn(2, 3, 8).to(dtype)
            args = (key, key.clone(), apart, apart.clone(), torch.tensor([3, 6]), 1.0, 2.0)
            yield from compare(ops.kv_cache_write, args, f"last dimension apart {dtype} into {stored}", 0.0)


def paged(
    generator: random.Random,
    lengths: list[int],
    rows: list[int],
    *,
    heads: int,
    kv_heads: int,
    head: int,
    value_head: int,
    block_size: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    inside: bool = False,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[Any, ...]:
    """Returns a sample with NaN in unused slots, arbitrary unused table entries and two rows of padding."""
    used = [-(-length // block_size) for length in lengths]
    blocks = sum(used) + 2
    width = head + value_head
    shape = (blocks, block_size, kv_heads, width) if inside else (blocks, kv_heads, block_size, width)
    cache = torch.randn(shape)
    logical = cache.transpose(1, 2) if inside else cache
    order = list(range(blocks))
    generator.shuffle(order)
    table = torch.full((len(lengths), max([*used, 1]) + 2), generator.choice((-1, 10**6)), dtype=torch.int32)
    empty = torch.ones(blocks, block_size, dtype=torch.bool)
    for request, (count, length) in enumerate(zip(used, lengths, strict=True)):
        behind = max(0, length - rows[request] - window + 1) if window > 0 else 0
        for column in range(count):
            block = order.pop()
            if (column + 1) * block_size > behind:
                table[request, column] = block
            places = torch.arange(column * block_size, (column + 1) * block_size)
            empty[block] = (places < behind) | (places >= length)
    logical.copy_(logical.masked_fill(empty[:, None, :, None], generator.choice((NAN, INF, -1e30))))
    whole = logical.to(stored) if not inside else cache.to(stored).transpose(1, 2)
    tokens = sum(rows)
    starts = [sum(rows[:i]) for i in range(len(rows) + 1)]
    return (
        torch.randn(tokens + 2, heads, head).to(dtype),
        whole[..., :head],
        whole[..., head:],
        table,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=generator.choice((torch.int32, torch.int64))),
        head**-0.5,
        causal,
        window,
        soft_cap,
        torch.rand(heads) if alibi else None,
        torch.randn(heads).to(dtype) if sinks else None,
        *scales,
        torch.full((tokens + 2, heads, value_head), 9.0).to(dtype),
    )


def context_lengths() -> Iterator[str]:
    from vllm_backplane import ops

    generator = random.Random(1)
    borders = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 127, 128, 129, 255, 257, 511, 512, 513, 514, 600]
    for dtype in (torch.float32, torch.bfloat16):
        for group, head in ((1, 64), (3, 64), (8, 128), (4, 80), (2, 96), (5, 72), (40, 16)):
            args = paged(
                generator, borders, [1] * len(borders), heads=2 * group, kv_heads=2, head=head, value_head=head,
                block_size=16, dtype=dtype, stored=dtype,
            )  # fmt: skip
            yield from compare(ops.paged_attention, args, f"group {group}, head {head}, {dtype}")
            args = paged(
                generator, [600, 130, 64], [3, 130, 65], heads=2 * group, kv_heads=2, head=head, value_head=head,
                block_size=16, dtype=dtype, stored=dtype,
            )  # fmt: skip
            yield from compare(ops.paged_attention, args, f"several rows, group {group}, head {head}, {dtype}")


def ragged_batches() -> Iterator[str]:
    from vllm_backplane import ops

    generator = random.Random(2)
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    for case in range(150):
        dtype = generator.choice(FLOATS)
        causal = generator.random() < 0.7
        rows = [generator.choice((0, 1, 1, 1, 2, 3, 5, 17, 70)) for _ in range(generator.randint(0, 6))]
        lengths = [
            generator.choice((0, count, count + generator.randint(0, 90), count + generator.randint(0, 700)))
            if not causal or generator.random() < 0.05
            else count + generator.choice((0, 0, generator.randint(0, 90), generator.randint(0, 700)))
            for count in rows
        ]
        head = generator.choice((64, 80, 96, 72, 5, 128, 256))
        features: dict[str, Any] = {
            "heads": 0,
            "kv_heads": generator.choice((1, 2, 3)),
            "head": head,
            "value_head": generator.choice((head, head, 24, 65)),
            "block_size": generator.choice((1, 4, 16, 32)),
            "dtype": dtype,
            "stored": generator.choice((dtype, dtype, torch.float32, *fp8)),
            "inside": generator.random() < 0.5,
            "causal": causal,
            "window": generator.choice((0, 0, -1, 1, 7, 64, 300)),
            "soft_cap": generator.choice((0.0, 0.0, 1.0, 30.0)),
            "alibi": generator.random() < 0.3,
            "sinks": generator.random() < 0.3,
            "scales": generator.choice(((1.0, 1.0), (0.5, 2.0))),
        }
        features["heads"] = features["kv_heads"] * generator.choice((1, 2, 3, 4, 6, 8))
        args = paged(generator, lengths, rows, **features)
        yield from compare(ops.paged_attention, args, f"case {case}: {rows} rows of {lengths}, {features}", 1e-5)
        tokens, starts = args[0].shape[0], args[4]
        key = torch.randn(tokens, 2 * features["kv_heads"], head).to(dtype)[:, ::2]
        value = torch.randn(tokens, features["kv_heads"], features["value_head"]).to(dtype)
        varlen = (args[0], key, value, starts, *args[6:12], args[-1])
        yield from compare(ops.varlen_attention, varlen, f"case {case}: {rows} rows, {features}", 1e-5)


def compare_masks(args: tuple[Any, ...], label: str) -> Iterator[str]:
    """Compares counts, because it is not defined which of several equal logits stay at the limit of top-p."""
    from vllm_backplane import ops

    (expected,) = outcome(ops.top_k_top_p_mask.reference, args, [0])
    staying = expected.sort(-1).values.nan_to_num(nan=7.25)
    for isa in each_isa():
        (actual,) = outcome(ops.top_k_top_p_mask.call, args, [0])
        survivors = (actual != -INF) & ~actual.isnan()
        if not torch.equal(actual[survivors], args[0][survivors]):
            yield f"top_k_top_p_mask ({isa}): {label}: a logit that stays was changed"
        if not torch.equal(actual.sort(-1).values.nan_to_num(nan=7.25), staying):
            counts = (actual != -INF).sum(-1).tolist(), (expected != -INF).sum(-1).tolist()
            yield f"top_k_top_p_mask ({isa}): {label}: other logits stay; by row {counts[0]}, not {counts[1]}"


def sampling_rows() -> Iterator[str]:
    from vllm_backplane import ops

    for size in (1, 5, 31, 64, 100, 1000, 4097, 40_000, 70_001):
        for coarse in (False, True):  # a 16-bit model has many equal logits
            logits = torch.randn(6, size) * 3
            logits = logits.bfloat16().float() if coarse else logits
            k = torch.randint(1, size + 1, (6,), dtype=torch.int32)
            k[:4] = torch.tensor([1, min(50, size), size, min(2000, size)])
            p = torch.tensor([0.9, 0.5, 1.0, 0.999, 0.01, 0.0])
            banned = logits.clone()
            banned[:, torch.rand(size) < 0.5] = -INF
            odd = logits.clone()
            odd[0, size // 2], odd[1, size // 3], odd[2] = NAN, INF, -INF
            for label, values in (("plain", logits), ("banned", banned), ("odd", odd)):
                for with_k, with_p in ((True, False), (False, True), (True, True)):
                    args = (values, k if with_k else None, p.clamp(max=0.9999) if with_p else None)
                    name = f"{size} {label} coarse {coarse} k {with_k} p {with_p}"
                    yield from compare_masks(args, name)
                    if not (coarse and with_p):
                        yield from compare(ops.top_k_top_p_mask, args, name)
                for dtype in FLOATS:
                    yield from compare(ops.greedy_argmax, (values.to(dtype),), f"{size} {label} {dtype}")
                    columns = values.to(dtype).t().contiguous().t()
                    yield from compare(ops.greedy_argmax, (columns,), f"{size} {label} {dtype} by columns")
            half = torch.zeros(3, 2 * size)
            half[:, :size] = logits[:3]
            yield from compare_masks((half[:, :size], k[:3].long(), p[:3].clamp(max=0.99)), f"{size} part")
            every = torch.stack((logits[0], logits[0]), -1)[None, :, 0]
            yield from compare(ops.top_k_top_p_mask, (every, k[1:2], None), f"{size} every second")


def thread_counts() -> Iterator[str]:
    """Yields the operators whose results differ in a bit with another number of threads; work is split by request."""
    for isa in each_isa():
        for name in operators_that_depend_on_threads():
            yield f"{name} ({isa}) depends on the number of threads"


def operators_that_depend_on_threads() -> Iterator[str]:
    from operator_checks import same_bits

    from vllm_backplane import ops
    from vllm_backplane.devices.cpu import native

    generator = random.Random(3)
    args = paged(
        generator, [3000, 700, 40, 300], [1, 2, 40, 300], heads=8, kv_heads=2, head=64, value_head=64, block_size=16,
        dtype=torch.bfloat16, stored=torch.bfloat16,
    )  # fmt: skip
    wide = torch.randn(300, 2048).bfloat16()
    blocks = native.to_blocks((torch.randn(200, 2048) / 45).bfloat16())
    angles = torch.rand(64, 64)
    calls: list[tuple[Any, tuple[Any, ...], list[int]]] = [
        (ops.paged_attention, args, [14]),
        *((ops.blocked_linear, (wide[:rows], blocks, 200, None), []) for rows in (150, 300)),
        (ops.rms_norm, (wide, wide[0], 1e-6), []),
        (ops.fused_add_rms_norm, (wide, wide, wide[0], 1e-6), []),
        (ops.silu_and_mul, (wide,), []),
        (ops.rotary_embedding, (torch.arange(300) % 64, wide, None, angles, 64, True), [1]),
        (ops.top_k_top_p_mask, (torch.randn(4, 50_000), None, torch.full((4,), 0.9)), [0]),
        (ops.greedy_argmax, (torch.randn(3, 100_000),), []),
        (ops.sample_by_race, (torch.rand(3, 100_000), torch.rand(3, 100_000)), []),
        (ops.min_p_mask, (torch.randn(3, 100_000), torch.rand(3)), [0]),
        (ops.apply_penalties, (torch.randn(9, 9000), *torch.randint(9000, (2, 9, 99)), *torch.rand(3, 9) + 0.5), [0]),
        (ops.allowed_tokens_mask, (torch.randn(3, 9000), torch.randint(2**31, (3, 282)).int()), [0]),
    ]
    before = torch.get_num_threads()
    for operator, given, written in calls:
        results = []
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(outcome(operator.call, given, written))
        for other in results[1:]:
            for left, right in zip(results[0], other, strict=True):
                if not same_bits(left, right):
                    yield operator.name
    torch.set_num_threads(before)


def refusals() -> Iterator[str]:
    from vllm_backplane import ops

    generator = random.Random(4)
    good = paged(
        generator, [20], [1], heads=4, kv_heads=2, head=8, value_head=8, block_size=16, dtype=torch.float32,
        stored=torch.float32,
    )  # fmt: skip

    def attention(place: int, value: Any) -> tuple[Any, ...]:
        return (*good[:place], value, *good[place + 1 :])

    rows, cache = torch.zeros(2, 1, 4), torch.zeros(2, 1, 4, 4)
    table = torch.zeros(8, 4)
    wrong: list[tuple[Any, tuple[Any, ...], str]] = [
        (ops.paged_attention, attention(0, good[0].double()), "Double"),
        (ops.paged_attention, attention(1, good[1].to(torch.int8)), "Char"),
        (ops.paged_attention, attention(3, good[3].clone().fill_(77)), "block 77"),
        (ops.paged_attention, attention(5, torch.tensor([900])), "table"),
        (ops.paged_attention, attention(4, torch.tensor([0, 50])), "rows"),
        (ops.paged_attention, attention(0, good[0][:, :3].contiguous()), "do not match"),
        (ops.kv_cache_write, (rows, rows, cache, cache, torch.tensor([0, 8]), 1.0, 1.0), "slot 8"),
        (ops.kv_cache_write, (rows, rows, cache.byte(), cache, torch.tensor([0, 1]), 1.0, 1.0), "viewed"),
        (ops.kv_cache_zero_blocks, (cache, torch.tensor([2])), "block 2"),
        (ops.rotary_embedding, (torch.tensor([8]), torch.zeros(1, 8), None, table, 4, True), "position 8"),
        (ops.rotary_embedding, (torch.tensor([1]), torch.zeros(1, 6), None, table, 4, True), "whole heads"),
        (ops.silu_and_mul, (torch.zeros(2, 3),), "even"),
        (ops.silu_and_mul, (torch.zeros(2, 4).double(),), "Double"),
        (ops.gelu, (torch.zeros(2, 4), "sigmoid"), "sigmoid"),
        (ops.rms_norm, (torch.zeros(2, 4), torch.zeros(3), 1e-5), "weight"),
        (ops.top_k_top_p_mask, (torch.zeros(2, 4).double(), torch.ones(2).int(), None), "float32"),
        *wrong_experts(),
        *wrong_choices(),
    ]
    for isa in each_isa():
        for operator, args, message in wrong:
            try:
                operator(*args)
            except RuntimeError as error:
                if message not in str(error):
                    yield f"{operator.name} ({isa}): the error is {error}, not {message!r}"
            else:
                yield f"{operator.name} ({isa}): accepted what should have been refused with {message!r}"


PARTS = (
    over_samples, norm_shapes, activation_shapes, rotary_shapes, cache_shapes, context_lengths, ragged_batches,
    long_contexts, sampling_rows, forbidden_tokens, penalized_tokens, drawn_tokens, lora_shapes, expert_shapes,
    norms_of_odd_numbers, rotations_of_odd_numbers, products_of_odd_numbers, attention_of_odd_numbers, long_prompts,
    thread_counts, refusals,
)  # fmt: skip


class EachIsa:
    """Repeats every test with every instruction set of the machine, or only with the best, as a plugin of pytest.

    test_every_operator.py takes longest and does not depend on the instruction set: it runs with the best only.
    """

    names = tuple(ISAS)

    def __init__(self, *, best_only: bool) -> None:
        available = tuple(each_isa())
        self.available = available[-1:] if best_only else available

    @pytest.fixture(autouse=True, params=names)
    def _isa(self, request: pytest.FixtureRequest) -> None:
        assert force_isa(ISAS[request.param]) == ISAS[request.param]

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        def wanted(item: pytest.Item) -> bool:
            isa = item.callspec.params["_isa"]  # type: ignore[attr-defined]
            return isa == self.available[-1] if item.path.name == "test_every_operator.py" else isa in self.available

        config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
        items[:] = filter(wanted, items)


def main() -> int:
    torch.manual_seed(0)
    from vllm_backplane.devices.cpu import native
    from vllm_backplane.ops.resolution import has_kernel

    assert native.fault() is None, native.fault()
    assert has_kernel("paged_attention", "CPU")
    if len(sys.argv) > 1:
        isas, *arguments = sys.argv[1:]
        assert isas in ("best", "every")
        return int(pytest.main(arguments, plugins=[EachIsa(best_only=isas == "best")]))
    print(json.dumps(report()))
    return 0


if __name__ == "__main__":
    sys.modules["compare_cpu_kernels"] = sys.modules["__main__"]  # the cases import it by name
    sys.exit(main())
