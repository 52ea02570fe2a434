"""Estimates the memory that a model's weights will take, from the headers of its checkpoint, before they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.weight_utils import (
    filter_duplicate_safetensors_files,
    filter_files_not_needed_for_inference,
)
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.transformers_utils.utils import parse_safetensors_file_metadata

from vllm_backplane.errors import BackplaneError
from vllm_backplane.gguf.config_folder import open_source
from vllm_backplane.gguf.decoding import FLOATS
from vllm_backplane.gguf.hf_config import QUANTIZATION
from vllm_backplane.gguf.packing import bytes_in_memory
from vllm_backplane.quantization.online import formats

logger = init_logger("vllm." + __name__)

CAST_DTYPES = ("F64", "F32", "F16", "BF16")
"""Safetensors dtypes that are cast to the model's dtype. Other dtypes hold quantized weights and are kept."""

INDEX = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")

UNQUANTIZED_TABLES = ("embed", "wte", "wpe")
"""Parts of the names of tables that keep the model's dtype under online quantization. A head that is tied to its
embedding is in no file; its quantized copy is not counted."""

UNQUANTIZED_LAYERS = {"gate", "router", "score"}
"""Names of linear layers that keep the model's dtype: routers, and the head of a classifier."""

EXPERT_LAYERS = {"experts", "block_sparse_moe"}
"""Names of layers whose tensors of three dimensions hold the weights of several experts."""


def weight_bytes(model: ModelConfig) -> int | None:
    """Returns the bytes that all weights of a model take in memory, or None if its headers cannot be found.

    A tensor that is in several files counts once, because it is loaded once. Raises if a local checkpoint is damaged.
    """
    if model.quantization == QUANTIZATION:
        return _gguf_bytes(model)
    path = Path(model.model)
    try:
        found = (
            _safetensors_headers(path)
            if path.is_dir()
            else get_safetensors_params_metadata(model.model, revision=model.revision)
        )
        tensors = [_Tensor.from_header(name, header) for name, header in found.items() if name != "__metadata__"]
        if not tensors and path.is_dir():
            tensors = [tensor for file in _pickle_files(path) for tensor in _pickled_tensors(file)]
    except Exception as fault:  # damaged files and unreachable hosts raise many types
        if path.is_dir():
            raise BackplaneError(
                f"the checkpoint {path} cannot be read ({type(fault).__name__}: {fault}); download or save it again"
            ) from fault
        logger.warning("The headers of %s cannot be read (%s: %s).", model.model, type(fault).__name__, fault)
        return None
    online = formats.ONLINE.get(model.quantization or "")
    # Experts with biases are quantized after the whole model is loaded, so they are in memory in the model's dtype.
    keeps_experts = any(tensor.is_bias_of_experts for tensor in tensors)
    total = 0
    for tensor in tensors:
        quantized = online is not None and tensor.is_quantized_online and not (keeps_experts and tensor.of_experts)
        total += tensor.bytes_as(model.dtype, online if quantized else None)
    return total or None


def _gguf_bytes(model: ModelConfig) -> int:
    """Returns the bytes of a GGUF file's weights in memory. A quantized embedding that is not tied to the head stays in
    the memory-mapped file and does not count."""
    file, tied = open_source(model.hf_config.quantization_config), model.hf_config.tie_word_embeddings
    mapped = {"token_embd.weight"} if not tied else set()
    return sum(
        bytes_in_memory(location.tensor, model.dtype)
        for name, location in file.tensors.items()
        if name not in mapped or location.tensor.type in FLOATS
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    bytes: int
    is_cast: bool
    """Whether loading casts the tensor to the model's dtype."""

    @classmethod
    def from_header(cls, name: str, header: Mapping[str, Any]) -> _Tensor:
        begin, end = header["data_offsets"]
        return cls(name, tuple(header["shape"]), int(end - begin), header["dtype"] in CAST_DTYPES)

    @property
    def of_experts(self) -> bool:
        return not EXPERT_LAYERS.isdisjoint(self.name.split("."))

    @property
    def is_bias_of_experts(self) -> bool:
        return "experts" in self.name.split(".") and self.name.endswith((".bias", "_proj_bias"))

    @property
    def is_quantized_online(self) -> bool:
        """Returns whether `--quantization int8` and `int4` quantize the tensor (`quantization/online/config.py`)."""
        is_matrix = len(self.shape) == 2 or (len(self.shape) == 3 and self.of_experts)
        if not (self.is_cast and is_matrix) or self.is_bias_of_experts:
            return False
        is_kept = not UNQUANTIZED_LAYERS.isdisjoint(self.name.split("."))
        return not is_kept and not any(part in self.name for part in UNQUANTIZED_TABLES)

    def bytes_as(self, dtype: torch.dtype, quantized: formats.Format | None) -> int:
        """Returns the bytes in memory: quantized, or in `dtype` if loading casts the tensor, or as in the file."""
        if not self.is_cast:
            return self.bytes
        if quantized is not None:
            *rows, fan_in = self.shape
            return quantized.bytes_of(math.prod(rows), fan_in)
        return math.prod(self.shape) * dtype.itemsize


def _safetensors_headers(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Returns the header of every tensor that vLLM loads. If the folder has the checkpoint in two layouts, vLLM loads
    the files that the index names."""
    files = sorted(str(file) for file in folder.glob("*.safetensors"))
    tensors: dict[str, Mapping[str, Any]] = {}
    for file in filter_duplicate_safetensors_files(files, str(folder), INDEX):
        tensors |= parse_safetensors_file_metadata(file)
        with safe_open(file, framework="pt"):  # raises if the file is shorter than its header states
            pass
    return tensors


def _pickle_files(folder: Path) -> list[str]:
    for pattern in PICKLE_PATTERNS:  # vLLM loads the first kind that exists
        files = sorted(str(file) for file in folder.glob(pattern))
        if files := filter_files_not_needed_for_inference(files):
            return files
    return []


def _pickled_tensors(file: str) -> Iterator[_Tensor]:
    state = torch.load(file, map_location="meta", weights_only=True, mmap=True)  # shapes and dtypes, without the data
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            yield _Tensor(name, tuple(tensor.shape), tensor.nbytes, tensor.is_floating_point())
