"""Writes GGUF files with the same weights that the other engines load.

Every matrix has the one type that the file is named for, including the embedding. `llama-quantize` by default keeps the
embedding in six bits, so llama.cpp reads slightly less here than usual. Vectors stay float32, as llama.cpp requires.
The `gguf` package writes the types of `WRITTEN`, and `llama-quantize` the others.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_backplane.errors import BackplaneError

WRITTEN = frozenset({"F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"})
"""The types that the `gguf` package can quantize to."""
PURE = ("--pure",)
"""Option of llama-quantize: one type for all matrices, except for rows that are not a multiple of the type's block."""
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


class NotQuantized(BackplaneError):
    """Reports that llama-quantize wrote no file."""


def gguf_name(name: str) -> str:
    """Returns the GGUF name of a Qwen2 tensor: `model.layers.3.mlp.up_proj.weight` becomes `blk.3.ffn_up.weight`."""
    path, _, kind = name.rpartition(".")
    if path in NAMES:
        return f"{NAMES[path]}.{kind}"
    _, _, number, part = path.split(".", 3)
    return f"blk.{number}.{LAYER_NAMES[part]}.{kind}"


def from_folder(folder: Path, file: Path, kind: str) -> None:
    """Converts a Qwen2 folder without a tokenizer into a GGUF file."""
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, weight in _tensors(folder):
        _add(writer, gguf_name(name), np.ascontiguousarray(weight), kind)
    _write(writer)


def requantized(source: Path, file: Path, kind: str) -> None:
    """Writes a copy of a GGUF file, including its tokenizer, with its matrices in another type."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(file, architecture)
    written_by_writer = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in written_by_writer:
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        _add(writer, tensor.name, values, kind)
    _write(writer)


def quantized(program: Path, source: Path, file: Path, kind: str, options: Sequence[str] = ()) -> None:
    """Quantizes a GGUF file with llama-quantize. `kind` is a name of llama-quantize, such as Q4_K_M."""
    command = [str(program), *options, str(source), str(file), kind]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not file.exists():
        output = (done.stderr + done.stdout).strip()[-500:]
        raise NotQuantized(f"llama-quantize wrote no {kind} file (exit {done.returncode}); its output ends: {output}")


def weights_by_type(file: Path) -> dict[str, int]:
    """Returns the number of weights in matrices by type, the most frequent type first."""
    from vllm_backplane.gguf.file import GgufFile

    counted: dict[str, int] = {}
    for tensor in GgufFile(file).tensors.values():
        if len(tensor.shape) > 1:
            counted[tensor.type.name] = counted.get(tensor.type.name, 0) + math.prod(tensor.shape)
    return dict(sorted(counted.items(), key=lambda one: -one[1]))


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    import torch
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            yield name, weights.get_tensor(name).to(torch.float32).numpy()


def _add(writer: Any, name: str, values: Any, kind: str) -> None:
    import gguf

    chosen = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(values, chosen), raw_dtype=chosen)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
