"""Measures linear layers with 8- and 4-bit weights as a share of the machine's limits, and compares with PyTorch.

    python benchmarks/quantized_linear.py                        # the kernels of the cpu device
    python benchmarks/quantized_linear.py --peers                # also those of PyTorch
    python benchmarks/quantized_linear.py --products avx512-vnni # with other instructions than the best ones
    python benchmarks/quantized_linear.py --json --rows 1 --group 128
    python benchmarks/quantized_linear.py --replayed         # many calls in one graph, as in a decode step
    python benchmarks/quantized_linear.py --cached --replayed --rows 1 --shapes 576x576  # without waiting for memory
    python benchmarks/quantized_linear.py --processor-time   # one thread, on a machine under other load
    python benchmarks/quantized_linear.py --rounding         # also the time to quantize the input

Two limits of the machine are measured with as many threads: the rate of reading memory (a loop over a buffer larger
than a core's caches), and the rate of 8-bit multiply-accumulates of the selected instructions without memory accesses.
With one input row a layer is bound by the first (bytes of codes and scales), with many rows by the second. Every call
uses another copy of the weight, as the layers of a model do, except with --cached. The columns of a line are measured
in turns, and the table has medians. A call from Python has an overhead of some ten microseconds, which is included
except with --replayed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.calls_in_turns import Call, medians, replayed
from vllm_backplane import ops
from vllm_backplane.devices.cpu import native

# (output features, input size): projections and LM head of SmolLM2-135M, and one each of 0.5B- and 1.5B-class models.
SHAPES = ((576, 576), (1536, 576), (49152, 576), (896, 4864), (1536, 8960))
FORMATS = {"int8": (8, 64, False), "int4": (4, 32, True), "Q8_0": (8, 32, False), "Q4_0": (4, 32, False)}
"""Bits, group size and offsets of --quantization int8 and int4, and of two GGUF types."""
COLD_BYTES = 256 << 20
MANY_ROWS = 64


def copies(weight: torch.Tensor, cached: bool = False) -> Any:
    """Yields copies of the weight in a cycle that is too long for the caches; with `cached`, always the same copy."""
    return cycle([weight.clone() for _ in range(1 if cached else min(max(2, COLD_BYTES // weight.nbytes), 2000))])


def ours(rows: int, n: int, k: int, bits: int, group: int, offsets: bool, cached: bool) -> tuple[Call, int]:
    """Returns a function that calls our kernel, and the bytes that it reads."""
    layout = native.quantized_layout()
    assert layout is not None
    width = layout.width
    padded = -(-k // (group or 8)) * (group or 8)
    blocks, groups = -(-n // width), padded // (group or padded)

    codes = torch.randint(256, (blocks, padded * bits // 32, width, 4), dtype=torch.uint8).view(layout.code_type(bits))
    scales = torch.rand(blocks, groups, width).to(torch.float16)
    size = codes.nbytes + scales.nbytes * (2 if offsets else 1)
    code_copies, scale_copies, offset_copies = (copies(part, cached) for part in (codes, scales, scales))
    weights = ((next(code_copies), next(scale_copies), next(offset_copies) if offsets else None) for _ in cycle([0]))
    x = torch.randn(rows, k)
    return lambda: ops.quantized_linear.call(x, *next(weights), bits, n, None), size


ROUNDINGS = 100
"""Repetitions within one call from Python."""


def rounding(rows: int, k: int, group: int) -> Call:
    """Returns a function that quantizes the input, the first part of every layer, ROUNDINGS times."""
    x = torch.randn(rows, k)
    sizes = [ctypes.c_int64(size) for size in (rows, k, -(-k // (group or k)), ROUNDINGS)]
    return lambda: native.library().backplane_cpu_round_input(ctypes.c_void_p(x.data_ptr()), *sizes)


def torch_int8_packed(rows: int, n: int, k: int) -> Call:
    """Returns a call of PyTorch's int8 weights with one scale per feature and a bfloat16 input."""
    weights = copies(torch.randint(-128, 128, (n, k), dtype=torch.int8))
    x, scales = torch.randn(rows, k).bfloat16(), torch.rand(n).bfloat16()
    return lambda: torch._weight_int8pack_mm(x, next(weights), scales)


def torch_int4_packed(rows: int, n: int, k: int) -> Call:
    """Returns a call of PyTorch's int4 weights in groups of 32 with scales and zeros, and a bfloat16 input."""
    plain = torch.randint(16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(plain, 1)
    weights = copies(packed)
    x, scales = torch.randn(rows, k).bfloat16(), torch.rand(k // 32, n, 2).bfloat16()
    return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, next(weights), 32, scales)


def kleidiai_int4(rows: int, n: int, k: int, group: int | None = 32) -> Call:
    """Returns a call of Arm's library in PyTorch, which quantizes x to 8 bits; scales are per group or per feature."""
    packed = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    scales = torch.rand(n, k // group).bfloat16() if group else torch.rand(n, 1)
    weight = torch.ops.aten._dyn_quant_pack_4bit_weight(packed, scales, None, group or k, k, n)
    weights = copies(weight)
    x = torch.randn(rows, k)
    return lambda: torch.ops.aten._dyn_quant_matmul_4bit(x, next(weights), group or k, k, n)


def torch_linear_dynamic(rows: int, n: int, k: int) -> Call:
    """Returns a call of oneDNN's 8-bit GEMM with one scale per feature, which quantizes x in every call."""
    torch.backends.quantized.engine = "onednn"
    scales, zeros = torch.rand(n) * 1e-2 + 1e-3, torch.zeros(n, dtype=torch.int64)
    weight = torch.quantize_per_channel(torch.randn(n, k) * 0.1, scales, zeros, 0, torch.qint8)
    # The packed weight takes additional memory, so there are fewer copies.
    weights = cycle([torch.ops.quantized.linear_prepack(weight, None) for _ in range(max(2, (64 << 20) // (n * k)))])
    x = torch.randn(rows, k)
    return lambda: torch.ops.quantized.linear_dynamic(x, next(weights), reduce_range=False)


def torch_int_mm(rows: int, n: int, k: int) -> Call:
    """Returns a call of PyTorch's integer GEMM, without scales."""
    weights = copies(torch.randint(-128, 128, (n, k), dtype=torch.int8).t())
    x = torch.randint(-127, 128, (rows, k), dtype=torch.int8)
    return lambda: torch._int_mm(x, next(weights))


def torch_float32(rows: int, n: int, k: int) -> Call:
    weights = copies(torch.randn(n, k))
    x = torch.randn(rows, k)
    return lambda: torch.nn.functional.linear(x, next(weights))


PEERS: dict[str, Callable[[int, int, int], Call]] = {
    "torch int8pack": torch_int8_packed,
    "torch int4pack": torch_int4_packed,
    "torch dynamic int8": torch_linear_dynamic,
    "torch int_mm": torch_int_mm,
    "torch float32": torch_float32,
}
if torch.backends.kleidiai.is_available():
    PEERS["KleidiAI int4"] = kleidiai_int4
    PEERS["KleidiAI int4 by feature"] = partial(kleidiai_int4, group=None)


class Limits:
    """Measures the machine's limits again for every line, because other load changes them."""

    def __init__(self, threads: int, clock: Callable[[], float]) -> None:
        self.threads, self.clock = threads, clock
        # A single thread's work is done in this thread, so that it counts as this thread's processor time.
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self.library = ctypes.CDLL(str(native._PATH))
        self.library.backplane_cpu_spin_dot_products.restype = ctypes.c_int64
        self.library.backplane_cpu_spin_float_products.restype = ctypes.c_int64
        self.buffer = torch.ones(COLD_BYTES, dtype=torch.uint8)

    def _together(self, call: Callable[[int], int]) -> float:
        """Returns the work of all threads per second, the best of a few attempts."""
        best = 0.0
        for _ in range(5):
            began = self.clock()
            done = sum(self.pool.map(call, range(self.threads)) if self.pool else [call(0)])
            best = max(best, done / (self.clock() - began))
        return best

    def bytes_per_second(self) -> float:
        part = COLD_BYTES // self.threads

        def read(index: int) -> int:
            address = ctypes.c_void_p(self.buffer.data_ptr() + index * part)
            self.library.backplane_cpu_read_memory(address, ctypes.c_int64(part))
            return part

        return self._together(read)

    def macs_per_second(self) -> float:
        """Returns the 8-bit multiply-accumulates per second of the selected dot-product instructions."""
        return self._together(lambda _: int(self.library.backplane_cpu_spin_dot_products(ctypes.c_int64(200_000))))

    def float_macs_per_second(self) -> float:
        """Returns the float32 multiply-accumulates per second."""
        return self._together(lambda _: int(self.library.backplane_cpu_spin_float_products(ctypes.c_int64(200_000))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 1024])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8", "int4"], help="default: int8 int4")
    parser.add_argument("--group", type=int, help="weights that share a scale; 0: a whole row (default: by format)")
    parser.add_argument("--offsets", action=argparse.BooleanOptionalAction, help="default: by format")
    parser.add_argument("--products", default="", help="name of the dot-product instructions (default: the best)")
    parser.add_argument("--shapes", nargs="+", help="as 576x576 (default: those of some models)")
    parser.add_argument("--peers", action="store_true", help="also measure PyTorch's kernels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="approximate time per column")
    parser.add_argument("--replayed", action="store_true", help="replay many calls in a graph, without Python")
    parser.add_argument("--cached", action="store_true", help="use one weight for all calls: memory does not matter")
    parser.add_argument("--rounding", action="store_true", help="also measure the quantization of the input")
    parser.add_argument("--processor-time", action="store_true", help="measure the processor time of one thread")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.cached and args.peers:
        parser.error("--cached applies only to our kernels; remove --peers")
    clock = time.thread_time if args.processor_time else time.perf_counter
    if args.processor_time:
        args.threads = 1
    torch.set_num_threads(args.threads)
    fault = native.fault()
    if fault is not None:
        raise SystemExit(": ".join(fault))
    native.use_dot_kernel(args.products)
    limits = Limits(args.threads, clock)
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes] if args.shapes else SHAPES
    lines = []
    for n, k in shapes:
        for rows in args.rows:
            kernels, roundings = {}, {}
            for name in args.formats:
                bits, group, offsets = FORMATS[name]
                group = group if args.group is None else args.group
                offsets = offsets if args.offsets is None else args.offsets
                kernels[name] = ours(rows, n, k, bits, group, offsets, args.cached)
                if args.rounding:
                    roundings[name] = rounding(rows, k, group)
            calls = {name: call for name, (call, _) in kernels.items()}
            if args.peers:
                calls |= {name: make(rows, n, k) for name, make in PEERS.items()}
            if args.replayed:
                # Each copy is used once, so that none is in the caches. With many rows memory hardly matters.
                each = max(2, COLD_BYTES // min(size for _, size in kernels.values())) if rows < MANY_ROWS else 2
                calls = {name: replayed(call, each) for name, call in calls.items()}
            memory, arithmetic = limits.bytes_per_second(), limits.macs_per_second()
            alongside = {f"{name}, rounding": call for name, call in roundings.items()}
            times = medians(calls | alongside, args.rounds, args.seconds, clock)
            rounded = {name: times.pop(f"{name}, rounding") / ROUNDINGS for name in roundings}
            if args.replayed:
                times = {name: seconds / each for name, seconds in times.items()}
            read = {name: size / times[name] for name, (_, size) in kernels.items()}
            done = {name: rows * n * k / value for name, value in times.items()}
            if not args.json:
                if not lines:
                    kind = "processor time" if args.processor_time else "wall-clock time"
                    print(f"{args.threads} threads, {kind}, {native.dot_kernel()}")
                    print(f"{'weight':>14}{'rows':>6}  GMAC/s; for our kernels also GB/s and shares of the limits")
                our_columns = "".join(
                    f"  {name} {done[name] / 1e9:.1f} ({read[name] / 1e9:.1f} GB/s, {read[name] / memory:.0%} memory,"
                    f" {done[name] / arithmetic:.0%} arithmetic"
                    + (
                        f", input quantized in {rounded[name] * 1e6:.2f} us, {rounded[name] / times[name]:.1%}"
                        if roundings
                        else ""
                    )
                    + ")"
                    for name in kernels
                )
                others = "".join(f"  {name} {value / 1e9:.1f}" for name, value in done.items() if name not in kernels)
                print(f"{n:>7} x{k:>5}{rows:>6}{our_columns}{others}", flush=True)
            lines.append(
                {"out": n, "in": k, "rows": rows, "seconds": times, "bytes_per_second": read,
                 "macs_per_second": done, "memory_limit": memory, "mac_limit": arithmetic,
                 "rounding": rounded}
            )  # fmt: skip
    if args.json:
        about = {"threads": args.threads, "instructions": native.dot_kernel(), "group": args.group}
        print(json.dumps({**about, "results": lines}, indent=2))


if __name__ == "__main__":
    main()
