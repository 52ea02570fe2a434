"""Compares matrix products with GGUF weights in the file's block layout and in the layout they are repacked to.

    python benchmarks/gguf_layouts.py
    python benchmarks/gguf_layouts.py --types Q6_K Q4_K --rows 1 --shapes 1536x8960 --json

`gguf_layouts.cpp`, which this program builds with g++, computes with the file's blocks, using the dot-product
instructions of ARMv8.2 (SDOT). `quantized_linear` uses the same instructions with the weights that `gguf/packing.py`
repacks. Both quantize the input in the same groups, so their results must agree to the rounding of float32; otherwise
the program fails.

It measures the processor time of one thread. Every call uses another copy of the weight, as the layers of a model do,
so that no weight is in the caches. Calls of both are made without Python and in turns, and the table has medians. Types
with blocks of 256 are omitted where the input size is not a multiple of 256.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES

from benchmarks.calls_in_turns import Call, medians, replayed
from vllm_backplane import ops
from vllm_backplane.devices.cpu import native
from vllm_backplane.gguf.decoding import QUANTIZED_TYPES, Type
from vllm_backplane.gguf.packing import packed_rows

TYPES = {Type.Q8_0: (0,), Type.Q6_K: (208,), Type.Q4_K: (0, 2), Type.IQ4_NL: (0,), Type.Q4_0: (0,)}
"""Measured types, with the byte offsets of the float16 numbers in a block."""
# (output features, input size) of SmolLM2-135M, and one each of a 0.5B-class and a 1.5B-class model.
SHAPES = ((576, 576), (1536, 576), (3072, 576), (576, 1536), (896, 4864), (1536, 8960))
COLD_BYTES, MAX_COPIES = 96 << 20, 2000
TOLERANCE = 1e-4
"""Tolerance relative to the largest result, because the two sum up float32 values in different orders."""
SOURCE = Path(__file__).with_suffix(".cpp")


FLAGS = ("-std=c++17", "-O3", "-march=armv8.2-a+dotprod", "-shared", "-fPIC")


def build_library() -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        raise SystemExit("g++ is not installed, which is needed to build gguf_layouts.cpp; install it")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "gguf_layouts.so"
        subprocess.run([compiler, *FLAGS, "-o", str(library), str(SOURCE)], check=True)
        return ctypes.CDLL(str(library))


def blocks_of(kind: Type, n: int, k: int) -> torch.Tensor:
    """Returns a weight with random codes, uint8 [n, row_bytes]."""
    weights, size = GGML_QUANT_SIZES[kind]
    raw = torch.randint(256, (n * k // weights, size), dtype=torch.uint8)
    for place in TYPES[kind]:
        raw[:, place : place + 2] = (torch.rand(len(raw), 1) * 0.01 + 0.001).half().view(torch.uint8)
    return raw.view(n, -1)


def repeated(tensor: torch.Tensor, copies: int) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(copies, *tensor.shape).contiguous()


class Comparison:
    """Holds one weight in both layouts, with more copies of each than fit into the caches."""

    def __init__(self, library: ctypes.CDLL, kind: Type, n: int, k: int) -> None:
        layout = native.quantized_layout()
        assert layout is not None
        self.n, self.k, self.bits = n, k, QUANTIZED_TYPES[kind].bits
        raw = blocks_of(kind, n, k)
        parts = [part for part in packed_rows([raw], kind, layout) if part is not None]
        self.bytes = {"file layout": raw.nbytes, "repacked": sum(part.nbytes for part in parts)}
        self.copies = min(max(2, COLD_BYTES // raw.nbytes), MAX_COPIES)
        self.raw = repeated(raw, self.copies)
        self.parts = [repeated(part, self.copies) for part in parts]
        self.multiply = getattr(library, f"multiply_{kind.name}")

    def repacked(self, x: torch.Tensor, copy: int) -> torch.Tensor:
        codes, scales, *offsets = (part[copy] for part in self.parts)
        return ops.quantized_linear.call(x, codes, scales, *(offsets or [None]), self.bits, self.n, None)

    def file_layout(self, x: torch.Tensor, out: torch.Tensor, copies: int) -> None:
        x_at, raw_at, out_at = (ctypes.c_void_p(one.data_ptr()) for one in (x, self.raw, out))
        sizes = [ctypes.c_int64(size) for size in (copies, self.n, self.k)]
        self.multiply(x_at, ctypes.c_int64(len(x)), raw_at, *sizes, out_at)

    def seconds(self, rows: int, rounds: int, seconds: float) -> dict[str, float]:
        """Returns the seconds per matrix product by layout, after comparing the results."""
        x, out = torch.randn(rows, self.k), torch.empty(rows, self.n)
        self.file_layout(x, out, 1)
        expected = self.repacked(x, 0)
        if not (out - expected).abs().max() <= TOLERANCE * expected.abs().max():
            raise SystemExit(f"{self.n} x {self.k}, {rows} rows: the two layouts of a weight give different results")
        copies = iter(range(self.copies))
        calls: dict[str, Call] = {
            "file layout": lambda: self.file_layout(x, out, self.copies),
            "repacked": replayed(lambda: self.repacked(x, next(copies)), self.copies),
        }
        found = medians(calls, rounds, seconds, time.thread_time)
        return {name: value / self.copies for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=[kind.name for kind in TYPES], help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--shapes", nargs="+", help="as 576x576, a multiple of 4 features (default: those of some models)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="approximate time per layout and line")
    parser.add_argument("--library", type=Path, help="gguf_layouts.cpp as a library, which is then not built")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if platform.machine() not in ("aarch64", "arm64"):
        raise SystemExit(f"gguf_layouts.cpp is written for ARM, and this machine is {platform.machine()}")
    fault = native.fault()
    if fault is not None:
        raise SystemExit(": ".join(fault))
    if "dotprod" not in native.available_dot_kernels():
        raise SystemExit("this processor has no dot-product instructions (ARMv8.2), which both layouts need")
    native.use_dot_kernel("dotprod")
    torch.set_num_threads(1)
    library = ctypes.CDLL(str(args.library)) if args.library else build_library()
    kinds = [kind for kind in TYPES if args.types is None or kind.name in args.types]
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes] if args.shapes else SHAPES
    lines: list[dict[str, Any]] = []
    for kind in kinds:
        for n, k in shapes:
            if n % 4 or k % GGML_QUANT_SIZES[kind][0]:
                continue
            comparison = Comparison(library, kind, n, k)
            for rows in args.rows:
                times = comparison.seconds(rows, args.rounds, args.seconds)
                ratio = times["file layout"] / times["repacked"]
                lines.append({"type": kind.name, "out": n, "in": k, "rows": rows, "seconds": times,
                              "bytes": comparison.bytes, "ratio": ratio})  # fmt: skip
                if not args.json:
                    if len(lines) == 1:
                        print(f"{'type':>7}{'weight':>13}{'rows':>5}  microseconds of processor time (GB/s of weights)")
                    each = "".join(
                        f"  {name} {value * 1e6:8.1f} ({comparison.bytes[name] / value / 1e9:4.1f})"
                        for name, value in times.items()
                    )
                    line = f"{kind.name:>7}{n:>7} x{k:>5}{rows:>5}{each}"
                    print(f"{line}  {ratio:.2f} times as fast repacked", flush=True)
    if args.json:
        print(json.dumps({"threads": 1, "clock": "processor time", "results": lines}, indent=2))


if __name__ == "__main__":
    main()
