"""Cuts some rows of each quantized type out of files that llama-quantize made: python cut_blocks.py FILE...

smollm2-blocks.gguf beside this program was made by it, of the files in which `make bench ARGS="--only formats"` has
SmolLM2-135M-Instruct (Apache-2.0) in Q2_K to Q6_K and IQ4_NL. A tensor is named as its type is, and holds whole rows of
one matrix. Where rows do not divide into the type's blocks the files have Q4_0, Q5_0, Q5_1 and Q8_0; none has Q4_1,
which the default model's own file is in.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf

from vllm_backplane.gguf.blocks import LAYOUTS

RESULT = Path(__file__).with_name("smollm2-blocks.gguf")
ROWS = slice(100, 103)
KINDS = [kind for kind in LAYOUTS if kind.name != "Q4_1"]


def main() -> None:
    found = {}
    for file in sys.argv[1:]:
        for tensor in gguf.GGUFReader(file).tensors:
            if tensor.tensor_type in KINDS and tensor.name.startswith("blk.14."):
                found.setdefault(tensor.tensor_type, tensor.data[ROWS].copy())
    missing = [kind.name for kind in KINDS if kind not in found]
    if missing:
        sys.exit(f"none of these files has {', '.join(missing)} in its layer 14; name more of them")
    writer = gguf.GGUFWriter(RESULT, "llama")
    for kind in KINDS:
        writer.add_tensor(kind.name, found[kind], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
