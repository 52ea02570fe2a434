"""Linear layers: what 16-bit weights cost beside float32, and the cpu device's kernels beside PyTorch's product.

    python benchmarks/linear.py                     # as this machine is
    python benchmarks/linear.py --without-bf16      # as a machine without BF16 instructions would do it
    python benchmarks/linear.py --json --rows 1 16  # two heights of input, as JSON
    python benchmarks/linear.py --types float32 float16 --served --replayed  # calls in one graph, as in a decode step

Every column of a line is measured in turns on the same shape, so that what else happens on the machine hits all. The
table shows medians of GFLOP/s (larger is better); then, for each type as it is served (`linear`, or `blocked_linear`
where the device arranges the weight), its time relative to the best float32 if that was measured, and how fast it reads
the weight, also as a share of how fast a loop that does nothing else reads memory. `--served` leaves out what is not
served: PyTorch's product of float16 takes minutes on a processor without FP16 instructions. `--processor-time` counts
one thread's processor time, for machines that do other work meanwhile.
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

# (rows of the weight, columns): SmolLM2-135M's projections, its logits, and two of larger models.
SHAPES = ((960, 576), (3072, 576), (576, 1536), (49152, 576), (4096, 2048), (8960, 1536))
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMIT = "ONEDNN_MAX_CPU_ISA"
COLD_BYTES = 256 << 20
MANY_ROWS = 64


def served(name: str) -> str:
    """The column of what the device does with weights of this type."""
    if native.wants_blocks(TYPES[name]):
        return f"{name} blocks"
    return f"{name} {'PyTorch' if name == 'float32' else 'rows'}"


def copies_of(n: int, k: int, dtype: torch.dtype) -> int:
    return max(2, COLD_BYTES // (n * k * dtype.itemsize))


def product(way: str, x: torch.Tensor, weight: torch.Tensor, cached: bool) -> Call:
    """Each call multiplies by another copy of the weight, as the layers of a model do: none is in the cache, unless it
    is to be."""
    n, count = weight.shape[0], 1 if cached else copies_of(*weight.shape, weight.dtype)
    weights = cycle([native.arranged(weight) if way == "blocks" else weight.clone() for _ in range(count)])
    if way == "blocks":
        return lambda: ops.blocked_linear.call(x, next(weights), n, None)
    if way == "rows":
        return lambda: ops.linear.call(x, next(weights), None)
    return lambda: torch.nn.functional.linear(x, next(weights))


def sides(rows: int, n: int, k: int, types: list[str], only_served: bool, cached: bool) -> dict[str, Call]:
    result: dict[str, Call] = {}
    for name in types:
        x, weight = torch.randn(rows, k).to(TYPES[name]), (torch.randn(n, k) * k**-0.5).to(TYPES[name])
        for way in ("PyTorch", "rows", "blocks"):
            column = f"{name} {way}"
            # `linear` of float32 is PyTorch's product.
            if column == served(name) or not (only_served or column == "float32 rows"):
                result[column] = product(way, x, weight, cached)
    return result


def reading(threads: int) -> Call:
    """Reads COLD_BYTES, each thread its part."""
    buffer = torch.ones(COLD_BYTES, dtype=torch.uint8)
    part = COLD_BYTES // threads
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def read(index: int) -> int:
        address = ctypes.c_void_p(buffer.data_ptr() + index * part)
        return native.library().backplane_cpu_read_memory(address, ctypes.c_int64(part))

    return lambda: list(pool.map(read, range(threads))) if pool else read(0)


def measured(args: argparse.Namespace, rows: int, n: int, k: int, read: Call) -> tuple[dict[str, float], float]:
    """Seconds by column, and bytes per second of the reading loop."""
    calls, each = sides(rows, n, k, args.types, args.served, args.cached), {}
    if args.replayed:
        # Every copy once, so that all are cold; with many rows memory hardly counts.
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
    parser.add_argument("--shapes", nargs="+", help="as 576x1536; default: those of some models")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["float32", "bfloat16"])
    parser.add_argument("--served", action="store_true", help="only what the device does with each type")
    parser.add_argument("--replayed", action="store_true", help="many calls in a graph, not from Python")
    parser.add_argument("--cached", action="store_true", help="one weight for all calls: memory does not count")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="per column, about")
    parser.add_argument("--processor-time", action="store_true", help="of one thread")
    parser.add_argument("--without-bf16", action="store_true", help=f"sets {LIMIT}=AVX512_CORE (x86 only)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.without_bf16 and LIMIT not in os.environ:
        os.environ[LIMIT] = "AVX512_CORE"  # read when libraries are loaded, so in a process that has it from the start
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if args.processor_time and args.threads != 1:
        parser.error("--processor-time is one thread's; add --threads 1")
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
            wide = min((value for name, value in times.items() if name.startswith("float32")), default=None)
            seconds = {name: times[served(name)] for name in args.types}
            rates = {name: n * k * TYPES[name].itemsize / value for name, value in seconds.items()}
            shares = {name: rate / memory for name, rate in rates.items()}
            relative = {name: value / wide for name, value in seconds.items()} if wide else {}
            if not args.json:
                if not lines:
                    print(f"{args.threads} threads, {LIMIT}={os.environ.get(LIMIT, '(not set)')}; GFLOP/s")
                    names = "".join(f"{name:>18}" for name in times)
                    print(f"{'weight':>14}{'rows':>6}{names}   as served: GB/s, share of reading, time over float32's")
                speeds = "".join(f"{2e-9 * rows * n * k / value:>18.1f}" for value in times.values())
                ends = [
                    f"   {name} {rates[name] / 1e9:.1f}, {shares[name]:.0%}"
                    + (f", {relative[name]:.2f}" if wide and name != "float32" else "")
                    for name in args.types
                ]
                print(f"{n:>7} x{k:>5}{rows:>6}{speeds}{''.join(ends)}", flush=True)
            line = {"out": n, "in": k, "rows": rows, "seconds": times, "time_to_float32": relative}
            lines.append({**line, "bytes_per_second": memory, "share_of_reading": shares})
    if args.json:
        print(json.dumps({"threads": args.threads, LIMIT: os.environ.get(LIMIT), "results": lines}, indent=2))


if __name__ == "__main__":
    main()
