"""Linear layers: what 16-bit weights cost beside float32, and the cpu device's kernels beside PyTorch's product.

    python benchmarks/linear.py                     # as this machine is
    python benchmarks/linear.py --without-bf16      # as a machine without BF16 instructions would do it
    python benchmarks/linear.py --json --rows 1 16  # two heights of input, as JSON

Every column of a line is measured in turns on the same shape, so that what else happens on the machine hits all. The
table shows medians of GFLOP/s (larger is better); then, for bfloat16 as it is served (`linear`, or `blocked_linear`
where the device arranges the weight), its time relative to the better float32, and how fast it reads the weight, also
as a share of how fast a loop that does nothing else reads memory. `--processor-time` counts one thread's processor
time, for machines that do other work meanwhile.
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
from calls_in_turns import Call, medians

from vllm_backplane import ops
from vllm_backplane.devices.cpu import native

# (rows of the weight, columns): SmolLM2-135M's projections, its logits, and two of larger models.
SHAPES = ((960, 576), (3072, 576), (576, 1536), (49152, 576), (4096, 2048), (8960, 1536))
LIMIT = "ONEDNN_MAX_CPU_ISA"
COLD_BYTES = 256 << 20


def sides(rows: int, n: int, k: int) -> dict[str, Call]:
    """Each call multiplies by another copy of the weight, as the layers of a model do: none is in the cache."""
    result: dict[str, Call] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        x, weight = torch.randn(rows, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype)
        copies = max(2, COLD_BYTES // (weight.numel() * weight.itemsize))
        plain = cycle([weight.clone() for _ in range(copies)])
        blocks = cycle([native.arranged(weight) for _ in range(copies)])
        result[f"{name} PyTorch"] = lambda x=x, w=plain: torch.nn.functional.linear(x, next(w))
        if name == "bfloat16":
            result[f"{name} rows"] = lambda x=x, w=plain: ops.linear.call(x, next(w), None)
        result[f"{name} blocks"] = lambda x=x, b=blocks: ops.blocked_linear.call(x, next(b), n, None)
    return result


def reading(threads: int) -> Call:
    """Reads COLD_BYTES, each thread its part."""
    buffer = torch.ones(COLD_BYTES, dtype=torch.uint8)
    part = COLD_BYTES // threads
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def read(index: int) -> int:
        address = ctypes.c_void_p(buffer.data_ptr() + index * part)
        return native.library().backplane_cpu_read_memory(address, ctypes.c_int64(part))

    return lambda: list((pool.map if pool else map)(read, range(threads)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
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
    clock = time.thread_time if args.processor_time else time.perf_counter
    torch.set_num_threads(args.threads)
    native.load()
    fault = native.fault()
    if fault is not None:
        raise SystemExit(": ".join(fault))
    served = "bfloat16 " + ("blocks" if native.wants_blocks(torch.bfloat16) else "rows")
    read = reading(args.threads)
    lines = []
    for n, k in SHAPES:
        for rows in args.rows:
            times = medians({**sides(rows, n, k), "reading": read}, args.rounds, args.seconds, clock)
            memory = COLD_BYTES / times.pop("reading")
            wide = min(value for name, value in times.items() if name.startswith("float32"))
            relative, share = times[served] / wide, 2 * n * k / times[served] / memory
            if not args.json:
                if not lines:
                    print(f"{args.threads} threads, {LIMIT}={os.environ.get(LIMIT, '(not set)')}; GFLOP/s")
                    names = "".join(f"{name:>18}" for name in times)
                    print(f"{'weight':>14}{'rows':>6}{names}{'16/32':>8}{'GB/s':>7}{'of reading':>12}")
                speeds = "".join(f"{2e-9 * rows * n * k / value:>18.1f}" for value in times.values())
                ends = f"{relative:>8.2f}{2e-9 * n * k / times[served]:>7.1f}{share:>12.0%}"
                print(f"{n:>7} x{k:>5}{rows:>6}{speeds}{ends}", flush=True)
            line = {"out": n, "in": k, "rows": rows, "seconds": times, "bf16_to_fp32_time": relative}
            lines.append({**line, "bytes_per_second": memory, "share_of_reading": share})
    if args.json:
        print(json.dumps({"threads": args.threads, LIMIT: os.environ.get(LIMIT), "results": lines}, indent=2))


if __name__ == "__main__":
    main()
