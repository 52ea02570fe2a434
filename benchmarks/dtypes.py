"""Compares bfloat16 with float32 in the whole engine: tokens per second of decode and prefill.

    python benchmarks/dtypes.py                     # smollm2-fp32, with all instructions of this machine
    python benchmarks/dtypes.py --without-bf16      # without BF16 instructions (x86 only)
    python benchmarks/dtypes.py --avx2              # with AVX2 at most: limits kernels, oneDNN, MKL and PyTorch

Two engines serve each request in turns. The table shows medians, and the median and quartiles of the ratios by turn.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.turns import KERNELS, add_options, compare, report

LIMIT = "ONEDNN_MAX_CPU_ISA"
WORKLOADS = [(1, 128), (1, 512), (1, 1024), (1, 1), (16, 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-bf16", action="store_true", help=f"sets {LIMIT}=AVX512_CORE")
    parser.add_argument(
        "--avx2", action="store_true", help="use instructions up to AVX2; the engine runs in one process"
    )
    parser.add_argument("--least", type=float, metavar="RATIO", help="fail if bfloat16 is below this in any workload")
    add_options(parser)
    args = parser.parse_args()
    from vllm_backplane.models import FULL_PRECISION, obtain

    variables = {LIMIT: "AVX512_CORE"} if args.without_bf16 else {}
    if args.avx2:
        variables = {
            LIMIT: "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            KERNELS: "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    limit = variables.get(LIMIT, os.environ.get(LIMIT))
    results = compare(
        str(obtain(FULL_PRECISION.name)),
        {dtype: ({"dtype": dtype}, variables) for dtype in ("float32", "bfloat16")},
        WORKLOADS,
        args.rounds,
    )
    return report(f"{FULL_PRECISION.name}, {LIMIT}={limit or '(not set)'}", results, args.least, args.json, limit=limit)


if __name__ == "__main__":
    sys.exit(main())
