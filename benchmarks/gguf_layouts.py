"""Products of GGUF's blocks as they lie in the file beside those of the same weights as they are laid out at load.

    python benchmarks/gguf_layouts.py
    python benchmarks/gguf_layouts.py --types Q6_K Q4_K --rows 1 --shapes 1536x8960 --json

`gguf_layouts.cpp`, which is built with g++ first, multiplies blocks as they lie, with the dot-product instructions of
ARMv8.2 (SDOT); `quantized_linear` multiplies what `gguf/packing.py` makes of them, with the same instructions. Both
round the input in the same groups, so results must agree to the rounding of float32, or the program fails. One thread
and its processor time; every call has another copy of the weight, as the layers of a model do, so none is in the
caches; calls of both are made without Python and measured in turns; the table has medians. Types with blocks of 256
are left out where the input is no multiple of that.
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
from vllm_backplane.gguf.blocks import LAYOUTS, Type
from vllm_backplane.gguf.packing import packed_rows

TYPES = {Type.Q8_0: (0,), Type.Q6_K: (208,), Type.Q4_K: (0, 2), Type.IQ4_NL: (0,), Type.Q4_0: (0,)}
"""And where a block has numbers in half precision."""
# (output features, input size): SmolLM2-135M's, and one of a 0.5B- and a 1.5B-class model each.
SHAPES = ((576, 576), (1536, 576), (3072, 576), (576, 1536), (896, 4864), (1536, 8960))
COLD_BYTES, MOST_COPIES = 96 << 20, 2000
TOLERANCE = 1e-4
"""Of the largest result: float32 rounds, and the sums are made in another order."""
SOURCE = Path(__file__).with_suffix(".cpp")


def built() -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        raise SystemExit("g++ is not installed, which builds the products of blocks as they lie")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "gguf_layouts.so"
        command = [compiler, "-std=c++17", "-O3", "-march=armv8.2-a+dotprod", "-shared", "-fPIC", "-o"]
        subprocess.run([*command, str(library), str(SOURCE)], check=True)
        return ctypes.CDLL(str(library))


def blocks_of(kind: Type, n: int, k: int) -> torch.Tensor:
    """Weights of random codes, uint8 [n, row_bytes]."""
    weights, size = GGML_QUANT_SIZES[kind]
    raw = torch.randint(256, (n * k // weights, size), dtype=torch.uint8)
    for place in TYPES[kind]:
        raw[:, place : place + 2] = (torch.rand(len(raw), 1) * 0.01 + 0.001).half().view(torch.uint8)
    return raw.view(n, -1)


def repeated(tensor: torch.Tensor, copies: int) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(copies, *tensor.shape).contiguous()


class Compared:
    """One weight in both forms, as many copies of each as caches do not hold."""

    def __init__(self, library: ctypes.CDLL, kind: Type, n: int, k: int) -> None:
        layout = native.quantized_layout()
        assert layout is not None
        self.n, self.k, self.bits = n, k, LAYOUTS[kind].bits
        raw = blocks_of(kind, n, k)
        parts = [part for part in packed_rows([raw], kind, layout) if part is not None]
        self.bytes = {"as they lie": raw.nbytes, "repacked": sum(part.nbytes for part in parts)}
        self.copies = min(max(2, COLD_BYTES // raw.nbytes), MOST_COPIES)
        self.raw = repeated(raw, self.copies)
        self.parts = [repeated(part, self.copies) for part in parts]
        self.multiply = getattr(library, f"multiply_{kind.name}")

    def repacked(self, x: torch.Tensor, copy: int) -> torch.Tensor:
        codes, scales, *offsets = (part[copy] for part in self.parts)
        return ops.quantized_linear.call(x, codes, scales, *(offsets or [None]), self.bits, self.n, None)

    def as_they_lie(self, x: torch.Tensor, out: torch.Tensor, copies: int) -> None:
        x_at, raw_at, out_at = (ctypes.c_void_p(one.data_ptr()) for one in (x, self.raw, out))
        sizes = [ctypes.c_int64(size) for size in (copies, self.n, self.k)]
        self.multiply(x_at, ctypes.c_int64(len(x)), raw_at, *sizes, out_at)

    def seconds(self, rows: int, rounds: int, seconds: float) -> dict[str, float]:
        """Per product."""
        x, out = torch.randn(rows, self.k), torch.empty(rows, self.n)
        self.as_they_lie(x, out, 1)
        expected = self.repacked(x, 0)
        if not (out - expected).abs().max() <= TOLERANCE * expected.abs().max():
            raise SystemExit(f"{self.n} x {self.k}, {rows} rows: the two forms of a weight do not give the same result")
        turns = iter(range(self.copies))
        calls: dict[str, Call] = {
            "as they lie": lambda: self.as_they_lie(x, out, self.copies),
            "repacked": replayed(lambda: self.repacked(x, next(turns)), self.copies),
        }
        found = medians(calls, rounds, seconds, time.thread_time)
        return {name: value / self.copies for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=[kind.name for kind in TYPES], help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--shapes", nargs="+", help="as 576x576, features in fours; default: those of some models")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="per form, about; each copy is read in every round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if platform.machine() not in ("aarch64", "arm64"):
        raise SystemExit(f"products of blocks as they lie are written for ARM; this machine is {platform.machine()}")
    fault = native.fault()
    if fault is not None:
        raise SystemExit(": ".join(fault))
    if "dotprod" not in native.known_dot_products():
        raise SystemExit("this processor has no dot-product instructions (ARMv8.2), which both products use")
    native.use_dot_products("dotprod")
    torch.set_num_threads(1)
    library = built()
    kinds = [kind for kind in TYPES if args.types is None or kind.name in args.types]
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes] if args.shapes else SHAPES
    lines: list[dict[str, Any]] = []
    for kind in kinds:
        for n, k in shapes:
            if n % 4 or k % GGML_QUANT_SIZES[kind][0]:
                continue
            compared = Compared(library, kind, n, k)
            for rows in args.rows:
                times = compared.seconds(rows, args.rounds, args.seconds)
                ratio = times["as they lie"] / times["repacked"]
                lines.append({"type": kind.name, "out": n, "in": k, "rows": rows, "seconds": times,
                              "bytes": compared.bytes, "ratio": ratio})  # fmt: skip
                if not args.json:
                    if len(lines) == 1:
                        print(f"{'type':>7}{'weight':>13}{'rows':>5}  microseconds of processor time (GB/s of weights)")
                    each = "".join(
                        f"  {name} {value * 1e6:8.1f} ({compared.bytes[name] / value / 1e9:4.1f})"
                        for name, value in times.items()
                    )
                    said = f"{kind.name:>7}{n:>7} x{k:>5}{rows:>5}{each}"
                    print(f"{said}  {ratio:.2f} times as fast repacked", flush=True)
    if args.json:
        print(json.dumps({"threads": 1, "clock": "processor time", "results": lines}, indent=2))


if __name__ == "__main__":
    main()
