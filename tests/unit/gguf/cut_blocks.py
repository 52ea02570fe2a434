"""Extracts some rows of each quantized type from files that llama-quantize wrote: python cut_blocks.py FILE...

This program wrote smollm2-blocks.gguf in the same folder. Its input were the files of SmolLM2-135M-Instruct
(Apache-2.0) in Q2_K to Q6_K and IQ4_NL that `make bench ARGS="--only formats"` makes. Each tensor has the name of its
type and holds whole rows of one matrix. Where rows do not divide into the type's blocks, llama-quantize writes Q4_0,
Q5_0, Q5_1 and Q8_0. None of the files has Q4_1, the type of the default model's own file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf

from vllm_backplane.gguf.decoding import QUANTIZED_TYPES

RESULT = Path(__file__).with_name("smollm2-blocks.gguf")
ROWS = slice(100, 103)
KINDS = [kind for kind in QUANTIZED_TYPES if kind.name != "Q4_1"]


def main() -> None:
    found = {}
    for file in sys.argv[1:]:
        for tensor in gguf.GGUFReader(file).tensors:
            if tensor.tensor_type in KINDS and tensor.name.startswith("blk.14."):
                found.setdefault(tensor.tensor_type, tensor.data[ROWS].copy())
    missing = [kind.name for kind in KINDS if kind not in found]
    if missing:
        sys.exit(f"none of these files has {', '.join(missing)} in its layer 14; give more files")
    writer = gguf.GGUFWriter(RESULT, "llama")
    for kind in KINDS:
        writer.add_tensor(kind.name, found[kind], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
