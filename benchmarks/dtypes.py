"""bfloat16 beside float32 through the whole engine: tokens per second when decoding and when reading a prompt.

    python benchmarks/dtypes.py                     # the default model, as this machine is
    python benchmarks/dtypes.py --without-bf16      # as a machine without BF16 instructions would do it (x86 only)
    python benchmarks/dtypes.py --avx2              # as one with AVX2 would: kernels, oneDNN, MKL and PyTorch limited

Two engines answer each request in turns; the table shows medians, and the median and quartiles of the turns' ratios.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.turns import KERNELS, add_options, compared, report

LIMIT = "ONEDNN_MAX_CPU_ISA"
WORKLOADS = [(1, 128), (1, 512), (1, 1024), (1, 1), (16, 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-bf16", action="store_true", help=f"sets {LIMIT}=AVX512_CORE")
    parser.add_argument("--avx2", action="store_true", help="instructions up to AVX2; the engine runs in one process")
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
    results = compared(
        str(obtain(FULL_PRECISION.name)),
        {dtype: ({"dtype": dtype}, variables) for dtype in ("float32", "bfloat16")},
        WORKLOADS,
        args.rounds,
    )
    return report(f"{FULL_PRECISION.name}, {LIMIT}={limit or '(not set)'}", results, args.least, args.json, limit=limit)


if __name__ == "__main__":
    sys.exit(main())
