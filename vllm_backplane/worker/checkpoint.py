"""How much memory the weights of a model will take, as far as its files tell before they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

logger = init_logger("vllm." + __name__)

CONVERTED = ("F64", "F32", "F16", "BF16")
"""Types that are loaded as the model's; the others are those of quantized weights and stay what they are."""

INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth")


def weight_bytes(model: ModelConfig) -> int | None:
    """None if nothing tells. Tensors that several files hold count once, as they are loaded once."""
    path = Path(model.model)
    if path.is_file():
        return path.stat().st_size  # one file is GGUF, whose blocks stay what they are
    try:
        found = (
            _in_folder(path) if path.is_dir() else get_safetensors_params_metadata(model.model, revision=model.revision)
        )
        count = sum(_bytes(tensor, model.dtype) for name, tensor in found.items() if name != "__metadata__")
        if not count and path.is_dir():
            count = sum(_pickled_bytes(file, model.dtype) for file in _pickled(path))
    except Exception as fault:  # a file may be broken, and a place unreachable, in any way
        if path.is_dir():
            raise BackplaneError(
                f"the checkpoint {path} cannot be read ({type(fault).__name__}: {fault}); fetch or save it again"
            ) from fault
        logger.warning("The headers of %s cannot be read (%s: %s).", model.model, type(fault).__name__, fault)
        return None
    return count or None


def _in_folder(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Of a checkpoint that lies there in two layouts, vLLM loads the files that the index names."""
    files = sorted(str(file) for file in folder.glob("*.safetensors"))
    tensors: dict[str, Mapping[str, Any]] = {}
    for file in filter_duplicate_safetensors_files(files, str(folder), INDEX):
        tensors |= parse_safetensors_file_metadata(file)
    return tensors


def _bytes(tensor: Mapping[str, Any], dtype: torch.dtype) -> int:
    if tensor["dtype"] in CONVERTED:
        return math.prod(tensor["shape"]) * dtype.itemsize
    begin, end = tensor["data_offsets"]
    return int(end - begin)


def _pickled(folder: Path) -> list[str]:
    for pattern in PICKLED:  # vLLM takes the first kind that is there
        files = sorted(str(file) for file in folder.glob(pattern))
        if files := filter_files_not_needed_for_inference(files):
            return files
    return []


def _pickled_bytes(file: str, dtype: torch.dtype) -> int:
    held = torch.load(file, map_location="meta", weights_only=True, mmap=True)  # descriptions alone, no numbers
    return sum(
        tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize for tensor in _tensors(held)
    )


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from _tensors(value)
