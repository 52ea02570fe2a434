"""How much memory the weights of a model will take, as far as its files tell before they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.weight_utils import (
    filter_duplicate_safetensors_files,
    filter_files_not_needed_for_inference,
)
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.transformers_utils.utils import parse_safetensors_file_metadata

from vllm_backplane.errors import BackplaneError
from vllm_backplane.gguf.blocks import FLOATS
from vllm_backplane.gguf.configuration import QUANTIZATION
from vllm_backplane.gguf.folder import source
from vllm_backplane.gguf.packing import bytes_in_memory
from vllm_backplane.quantization.online import formats

logger = init_logger("vllm." + __name__)

CONVERTED = ("F64", "F32", "F16", "BF16")
"""Types that are loaded as the model's; the others are those of quantized weights and stay what they are."""

INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth")


UNQUANTIZED = ("embed", "wte", "wpe", "experts")
"""Parts of the names of matrices that keep the model's type when the others are quantized at loading. A head that is
tied to its embedding is in no file; its quantized copy is not counted."""


def weight_bytes(model: ModelConfig) -> int | None:
    """None if nothing tells. Tensors that several files hold count once, as they are loaded once."""
    if model.quantization == QUANTIZATION:
        return _in_gguf(model)
    path = Path(model.model)
    try:
        found = (
            _in_folder(path) if path.is_dir() else get_safetensors_params_metadata(model.model, revision=model.revision)
        )
        tensors = [_Tensor.described(name, header) for name, header in found.items() if name != "__metadata__"]
        if not tensors and path.is_dir():
            tensors = [tensor for file in _pickled(path) for tensor in _in_pickle(file)]
    except Exception as fault:  # a file may be broken, and a place unreachable, in any way
        if path.is_dir():
            raise BackplaneError(
                f"the checkpoint {path} cannot be read ({type(fault).__name__}: {fault}); fetch or save it again"
            ) from fault
        logger.warning("The headers of %s cannot be read (%s: %s).", model.model, type(fault).__name__, fault)
        return None
    quantized = formats.ONLINE.get(model.quantization or "")
    return sum(tensor.bytes_as(model.dtype, quantized) for tensor in tensors) or None


def _in_gguf(model: ModelConfig) -> int:
    """Of what is multiplied. An embedding that is not tied stays where the file is mapped."""
    file, tied = source(model.hf_config.quantization_config), model.hf_config.tie_word_embeddings
    mapped = {"token_embd.weight"} if not tied else set()
    return sum(
        bytes_in_memory(placed.tensor, model.dtype)
        for name, placed in file.tensors.items()
        if name not in mapped or placed.tensor.type in FLOATS
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    bytes: int
    converted: bool
    """Loaded as the model's type, whatever it is in the file."""

    @classmethod
    def described(cls, name: str, header: Mapping[str, Any]) -> _Tensor:
        begin, end = header["data_offsets"]
        return cls(name, tuple(header["shape"]), int(end - begin), header["dtype"] in CONVERTED)

    def bytes_as(self, dtype: torch.dtype, quantized: formats.Format | None) -> int:
        if not self.converted:
            return self.bytes
        if quantized and len(self.shape) == 2 and not any(part in self.name for part in UNQUANTIZED):
            return quantized.bytes_of(*self.shape)
        return math.prod(self.shape) * dtype.itemsize


def _in_folder(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Of a checkpoint that lies there in two layouts, vLLM loads the files that the index names."""
    files = sorted(str(file) for file in folder.glob("*.safetensors"))
    tensors: dict[str, Mapping[str, Any]] = {}
    for file in filter_duplicate_safetensors_files(files, str(folder), INDEX):
        tensors |= parse_safetensors_file_metadata(file)
    return tensors


def _pickled(folder: Path) -> list[str]:
    for pattern in PICKLED:  # vLLM takes the first kind that is there
        files = sorted(str(file) for file in folder.glob(pattern))
        if files := filter_files_not_needed_for_inference(files):
            return files
    return []


def _in_pickle(file: str) -> Iterator[_Tensor]:
    held = torch.load(file, map_location="meta", weights_only=True, mmap=True)  # descriptions alone, no numbers
    for name, tensor in held.items():
        if isinstance(tensor, torch.Tensor):
            yield _Tensor(name, tuple(tensor.shape), tensor.nbytes, tensor.is_floating_point())
