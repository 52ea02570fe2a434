"""Measures linear layers: 16-bit weights against float32, and the cpu device's kernels against PyTorch's.

    python benchmarks/linear.py                     # with all instructions of this machine
    python benchmarks/linear.py --without-bf16      # without BF16 instructions
    python benchmarks/linear.py --json --rows 1 16  # two numbers of input rows, as JSON
    python benchmarks/linear.py --types float32 float16 --served --replayed  # calls in one graph, as in a decode step

All columns of a line are measured in turns on the same shape, so that other load affects all of them. The table shows
medians of GFLOP/s (larger is better). For each dtype as it is served (with `linear`, or with `blocked_linear` where the
device blocks the weight), it also shows the time relative to the fastest float32 if that was measured, and the rate at
which the weight is read, also as a share of the rate of a loop that only reads memory. `--served` omits the other
columns: PyTorch's float16 takes minutes on a processor without FP16 instructions. `--processor-time` measures the
processor time of one thread, for machines under other load.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import torch

from benchmarks.calls_in_turns import Call, medians, replayed
from vllm_backplane import ops
from vllm_backplane.devices.cpu import native

# (rows of the weight, columns): the projections and the LM head of SmolLM2-135M, and two of larger models.
SHAPES = ((960, 576), (3072, 576), (576, 1536), (49152, 576), (4096, 2048), (8960, 1536))
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMIT = "ONEDNN_MAX_CPU_ISA"
COLD_BYTES = 256 << 20
MANY_ROWS = 64


def served(name: str) -> str:
    """Returns the column of the kernel that the device uses for weights of this dtype."""
    if native.wants_blocks(TYPES[name]):
        return f"{name} blocks"
    return f"{name} {'PyTorch' if name == 'float32' else 'rows'}"


def copies_of(n: int, k: int, dtype: torch.dtype) -> int:
    return max(2, COLD_BYTES // (n * k * dtype.itemsize))


def linear_call(kernel: str, x: torch.Tensor, weight: torch.Tensor, cached: bool) -> Call:
    """Returns a function that computes the linear layer with another copy of the weight in each call.

    The layers of a model have different weights too, so the weight is not in the caches. With `cached` all calls use
    the same copy.
    """
    n, count = weight.shape[0], 1 if cached else copies_of(*weight.shape, weight.dtype)
    weights = cycle([native.to_blocks(weight) if kernel == "blocks" else weight.clone() for _ in range(count)])
    if kernel == "blocks":
        return lambda: ops.blocked_linear.call(x, next(weights), n, None)
    if kernel == "rows":
        return lambda: ops.linear.call(x, next(weights), None)
    return lambda: torch.nn.functional.linear(x, next(weights))


def columns(rows: int, n: int, k: int, types: list[str], only_served: bool, cached: bool) -> dict[str, Call]:
    result: dict[str, Call] = {}
    for name in types:
        x, weight = torch.randn(rows, k).to(TYPES[name]), (torch.randn(n, k) * k**-0.5).to(TYPES[name])
        for kernel in ("PyTorch", "rows", "blocks"):
            column = f"{name} {kernel}"
            # `linear` with float32 weights calls PyTorch, so that column would repeat another.
            if column == served(name) or not (only_served or column == "float32 rows"):
                result[column] = linear_call(kernel, x, weight, cached)
    return result


def reading(threads: int) -> Call:
    """Returns a function that reads COLD_BYTES of memory, split among the threads."""
    buffer = torch.ones(COLD_BYTES, dtype=torch.uint8)
    part = COLD_BYTES // threads
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def read(index: int) -> int:
        address = ctypes.c_void_p(buffer.data_ptr() + index * part)
        return native.library().backplane_cpu_read_memory(address, ctypes.c_int64(part))

    return lambda: list(pool.map(read, range(threads))) if pool else read(0)


def measured(args: argparse.Namespace, rows: int, n: int, k: int, read: Call) -> tuple[dict[str, float], float]:
    """Returns the seconds by column, and the bytes per second of the reading loop."""
    calls, each = columns(rows, n, k, args.types, args.served, args.cached), {}
    if args.replayed:
        # Each copy is used once, so that none is in the caches. With many rows memory hardly matters.
        for name in calls:
            each[name] = copies_of(n, k, TYPES[name.split()[0]]) if rows < MANY_ROWS else 2
        calls = {name: replayed(call, each[name]) for name, call in calls.items()}
    clock = time.thread_time if args.processor_time else time.perf_counter
    times = medians({**calls, "reading": read}, args.rounds, args.seconds, clock)
    memory = COLD_BYTES / times.pop("reading")
    return {name: seconds / each.get(name, 1) for name, seconds in times.items()}, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--shapes", nargs="+", help="as 576x1536 (default: those of some models)")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["float32", "bfloat16"])
    parser.add_argument("--served", action="store_true", help="only the kernel that the device uses for each dtype")
    parser.add_argument("--replayed", action="store_true", help="replay many calls in a graph, without Python")
    parser.add_argument("--cached", action="store_true", help="use one weight for all calls: memory does not matter")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="approximate time per column")
    parser.add_argument("--processor-time", action="store_true", help="measure the processor time of one thread")
    parser.add_argument("--without-bf16", action="store_true", help=f"sets {LIMIT}=AVX512_CORE (x86 only)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.without_bf16 and LIMIT not in os.environ:
        os.environ[LIMIT] = "AVX512_CORE"  # libraries read it when they are loaded, so the process starts again
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if args.processor_time and args.threads != 1:
        parser.error("--processor-time measures one thread; add --threads 1")
    torch.set_num_threads(args.threads)
    native.load()
    fault = native.fault()
    if fault is not None:
        raise SystemExit(": ".join(fault))
    read = reading(args.threads)
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes] if args.shapes else SHAPES
    lines = []
    for n, k in shapes:
        for rows in args.rows:
            times, memory = measured(args, rows, n, k, read)
            float32 = min((value for name, value in times.items() if name.startswith("float32")), default=None)
            seconds = {name: times[served(name)] for name in args.types}
            rates = {name: n * k * TYPES[name].itemsize / value for name, value in seconds.items()}
            shares = {name: rate / memory for name, rate in rates.items()}
            relative = {name: value / float32 for name, value in seconds.items()} if float32 else {}
            if not args.json:
                if not lines:
                    print(f"{args.threads} threads, {LIMIT}={os.environ.get(LIMIT, '(not set)')}; GFLOP/s")
                    names = "".join(f"{name:>18}" for name in times)
                    print(f"{'weight':>14}{'rows':>6}{names}   as served: GB/s, share of reading, time / float32")
                speeds = "".join(f"{2e-9 * rows * n * k / value:>18.1f}" for value in times.values())
                ends = [
                    f"   {name} {rates[name] / 1e9:.1f}, {shares[name]:.0%}"
                    + (f", {relative[name]:.2f}" if float32 and name != "float32" else "")
                    for name in args.types
                ]
                print(f"{n:>7} x{k:>5}{rows:>6}{speeds}{''.join(ends)}", flush=True)
            line = {"out": n, "in": k, "rows": rows, "seconds": times, "time_to_float32": relative}
            lines.append({**line, "bytes_per_second": memory, "share_of_reading": shares})
    if args.json:
        print(json.dumps({"threads": args.threads, LIMIT: os.environ.get(LIMIT), "results": lines}, indent=2))


if __name__ == "__main__":
    main()
