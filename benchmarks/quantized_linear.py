"""Linear layers of 8- and 4-bit weights as a share of what the machine can do, beside what PyTorch offers.

    python benchmarks/quantized_linear.py                        # the cpu device's products
    python benchmarks/quantized_linear.py --peers                # and PyTorch's
    python benchmarks/quantized_linear.py --products avx512-vnni # with other instructions than the best
    python benchmarks/quantized_linear.py --json --rows 1 --group 128
    python benchmarks/quantized_linear.py --replayed         # many calls in one graph, as in a decode step
    python benchmarks/quantized_linear.py --cached --replayed --rows 1 --shapes 576x576  # without waiting for memory
    python benchmarks/quantized_linear.py --processor-time   # one thread, where other work shares the machine
    python benchmarks/quantized_linear.py --rounding         # and what part of a product the rounding of its input is

Two limits are measured first, with as many threads: how fast memory is read (a loop that reads a buffer larger than a
core's caches and keeps nothing), and how many multiplications of 8-bit numbers the instructions in use do without
memory. With one row a layer is held against the first (bytes of codes and scales), with many against the second. Every
call has another copy of the weight, as the layers of a model do (unless it is to stay in the caches). Columns of a line
are measured in turns; the table has medians. A call from Python takes some ten microseconds on its own, which are part
of what is measured unless it is replayed.
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

# (output features, input size): SmolLM2-135M's projections and logits, and one of a 0.5B- and a 1.5B-class model each.
SHAPES = ((576, 576), (1536, 576), (49152, 576), (896, 4864), (1536, 8960))
FORMATS = {"int8": (8, 64, False), "int4": (4, 32, True), "Q8_0": (8, 32, False), "Q4_0": (4, 32, False)}
"""Bits, group and offsets, as --quantization int8 and int4 make them, and as two types of GGUF have them."""
COLD_BYTES = 256 << 20
MANY_ROWS = 64


def copies(weight: torch.Tensor, cached: bool = False) -> Any:
    """One after another, none of them in the cache when its turn comes; or always the same one."""
    return cycle([weight.clone() for _ in range(1 if cached else min(max(2, COLD_BYTES // weight.nbytes), 2000))])


def ours(rows: int, n: int, k: int, bits: int, group: int, offsets: bool, cached: bool) -> tuple[Call, int]:
    """The call, and the bytes it reads."""
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
"""In one call, which Python makes."""


def rounding(rows: int, k: int, group: int) -> Call:
    """What a product does with its input first, ROUNDINGS times."""
    x = torch.randn(rows, k)
    sizes = [ctypes.c_int64(size) for size in (rows, k, -(-k // (group or k)), ROUNDINGS)]
    return lambda: native.library().backplane_cpu_round_input(ctypes.c_void_p(x.data_ptr()), *sizes)


def torch_int8_packed(rows: int, n: int, k: int) -> Call:
    """One scale per feature; x stays bfloat16."""
    weights = copies(torch.randint(-128, 128, (n, k), dtype=torch.int8))
    x, scales = torch.randn(rows, k).bfloat16(), torch.rand(n).bfloat16()
    return lambda: torch._weight_int8pack_mm(x, next(weights), scales)


def torch_int4_packed(rows: int, n: int, k: int) -> Call:
    """Groups of 32 with scales and zeros; x stays bfloat16."""
    plain = torch.randint(16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(plain, 1)
    weights = copies(packed)
    x, scales = torch.randn(rows, k).bfloat16(), torch.rand(k // 32, n, 2).bfloat16()
    return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, next(weights), 32, scales)


def kleidiai_int4(rows: int, n: int, k: int, group: int | None = 32) -> Call:
    """Arm's library inside PyTorch: x rounded to 8 bits at every call; scales per group, or per feature."""
    packed = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    scales = torch.rand(n, k // group).bfloat16() if group else torch.rand(n, 1)
    weight = torch.ops.aten._dyn_quant_pack_4bit_weight(packed, scales, None, group or k, k, n)
    weights = copies(weight)
    x = torch.randn(rows, k)
    return lambda: torch.ops.aten._dyn_quant_matmul_4bit(x, next(weights), group or k, k, n)


def torch_linear_dynamic(rows: int, n: int, k: int) -> Call:
    """oneDNN's product of 8-bit numbers, one scale per feature, x rounded at every call."""
    torch.backends.quantized.engine = "onednn"
    scales, zeros = torch.rand(n) * 1e-2 + 1e-3, torch.zeros(n, dtype=torch.int64)
    weight = torch.quantize_per_channel(torch.randn(n, k) * 0.1, scales, zeros, 0, torch.qint8)
    # Its packing keeps memory of its own; fewer copies, so that it fits.
    weights = cycle([torch.ops.quantized.linear_prepack(weight, None) for _ in range(max(2, (64 << 20) // (n * k)))])
    x = torch.randn(rows, k)
    return lambda: torch.ops.quantized.linear_dynamic(x, next(weights), reduce_range=False)


def torch_int_mm(rows: int, n: int, k: int) -> Call:
    """Products of integers alone, without scales."""
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
    """Measured again beside every line: what else runs on the machine changes both."""

    def __init__(self, threads: int, clock: Callable[[], float]) -> None:
        self.threads, self.clock = threads, clock
        # One thread's work is done here, so that this thread's processor time has it.
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self.library = ctypes.CDLL(str(native._PATH))
        self.library.backplane_cpu_spin_dot_products.restype = ctypes.c_int64
        self.library.backplane_cpu_spin_float_products.restype = ctypes.c_int64
        self.buffer = torch.ones(COLD_BYTES, dtype=torch.uint8)

    def _together(self, call: Callable[[int], int]) -> float:
        """What all threads did per second; the best of a few tries."""
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

    def products_per_second(self) -> float:
        return self._together(lambda _: int(self.library.backplane_cpu_spin_dot_products(ctypes.c_int64(200_000))))

    def float_products_per_second(self) -> float:
        return self._together(lambda _: int(self.library.backplane_cpu_spin_float_products(ctypes.c_int64(200_000))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 1024])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8", "int4"], help="default: int8 int4")
    parser.add_argument("--group", type=int, help="weights that share a scale; 0: all of a row; default: the format's")
    parser.add_argument("--offsets", action=argparse.BooleanOptionalAction, help="default: the format's")
    parser.add_argument("--products", default="", help="a set of instructions by name; default: the best")
    parser.add_argument("--shapes", nargs="+", help="as 576x576; default: those of some models")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="per column, about")
    parser.add_argument("--replayed", action="store_true", help="many calls in a graph, not from Python")
    parser.add_argument("--cached", action="store_true", help="one weight for all calls: memory does not count")
    parser.add_argument("--rounding", action="store_true", help="the rounding of the input by itself")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, instead of time on the wall")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.cached and args.peers:
        parser.error("--cached is for our products alone; leave --peers out")
    clock = time.thread_time if args.processor_time else time.perf_counter
    if args.processor_time:
        args.threads = 1
    torch.set_num_threads(args.threads)
    fault = native.fault()
    if fault is not None:
        raise SystemExit(": ".join(fault))
    native.use_dot_products(args.products)
    limits = Limits(args.threads, clock)
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes] if args.shapes else SHAPES
    lines = []
    for n, k in shapes:
        for rows in args.rows:
            made, parts = {}, {}
            for name in args.formats:
                bits, group, offsets = FORMATS[name]
                group = group if args.group is None else args.group
                offsets = offsets if args.offsets is None else args.offsets
                made[name] = ours(rows, n, k, bits, group, offsets, args.cached)
                if args.rounding:
                    parts[name] = rounding(rows, k, group)
            calls = {name: call for name, (call, _) in made.items()}
            if args.peers:
                calls |= {name: make(rows, n, k) for name, make in PEERS.items()}
            if args.replayed:
                # Every copy once, so that all are cold; with many rows memory hardly counts.
                each = max(2, COLD_BYTES // min(size for _, size in made.values())) if rows < MANY_ROWS else 2
                calls = {name: replayed(call, each) for name, call in calls.items()}
            memory, products = limits.bytes_per_second(), limits.products_per_second()
            beside = {f"{name}, rounding": call for name, call in parts.items()}
            times = medians(calls | beside, args.rounds, args.seconds, clock)
            rounded = {name: times.pop(f"{name}, rounding") / ROUNDINGS for name in parts}
            if args.replayed:
                times = {name: seconds / each for name, seconds in times.items()}
            read = {name: size / times[name] for name, (_, size) in made.items()}
            done = {name: rows * n * k / value for name, value in times.items()}
            if not args.json:
                if not lines:
                    kind = "processor time" if args.processor_time else "time on the wall"
                    print(f"{args.threads} threads, {kind}, {native.dot_products()}")
                    print(f"{'weight':>14}{'rows':>6}  GMAC/s; for ours GB/s and shares of what was measured beside it")
                ourselves = "".join(
                    f"  {name} {done[name] / 1e9:.1f} ({read[name] / 1e9:.1f} GB/s, {read[name] / memory:.0%} memory,"
                    f" {done[name] / products:.0%} products"
                    + (
                        f", input rounded in {rounded[name] * 1e6:.2f} us, {rounded[name] / times[name]:.1%}"
                        if parts
                        else ""
                    )
                    + ")"
                    for name in made
                )
                others = "".join(f"  {name} {value / 1e9:.1f}" for name, value in done.items() if name not in made)
                print(f"{n:>7} x{k:>5}{rows:>6}{ourselves}{others}", flush=True)
            lines.append(
                {"out": n, "in": k, "rows": rows, "seconds": times, "bytes_per_second": read,
                 "products_per_second": done, "memory_limit": memory, "product_limit": products,
                 "rounding": rounded}
            )  # fmt: skip
    if args.json:
        stated = {"threads": args.threads, "products": native.dot_products(), "group": args.group}
        print(json.dumps({**stated, "results": lines}, indent=2))


if __name__ == "__main__":
    main()
