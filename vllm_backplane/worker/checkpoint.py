"""How much memory the weights of a model will take, as far as its files tell before they are loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.transformers_utils.config import get_safetensors_params_metadata

from vllm_backplane.errors import BackplaneError
from vllm_backplane.layers.quantization import formats

logger = init_logger("vllm." + __name__)

CONVERTED = ("F64", "F32", "F16", "BF16")
"""Types that are loaded as the model's; the others are those of quantized weights and stay what they are."""

OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")


UNQUANTIZED = ("embed", "wte", "wpe", "experts")
"""Parts of the names of matrices that keep the model's type when the others are quantized at loading. A head that is
tied to its embedding is in no file; its quantized copy is not counted."""


def weight_bytes(model: ModelConfig) -> int | None:
    """None if nothing tells. Tensors that several files hold count once, as they are loaded once."""
    path = Path(model.model)
    try:
        tensors = [] if path.is_file() else _tensors(model)
    except Exception as fault:  # a header may be broken, and a place unreachable, in any way
        if path.is_dir():
            raise BackplaneError(
                f"the checkpoint {path} cannot be read ({type(fault).__name__}: {fault}); fetch or save it again"
            ) from fault
        logger.warning("The headers of %s cannot be read (%s: %s).", model.model, type(fault).__name__, fault)
        return None
    if tensors:
        quantized = formats.ONLINE.get(model.quantization or "")
        return sum(_bytes(name, tensor, model.dtype.itemsize, quantized) for name, tensor in tensors)
    files = [path] if path.is_file() else [file for pattern in OTHER_FORMATS for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in files) or None


def _tensors(model: ModelConfig) -> list[tuple[str, Mapping[str, Any]]]:
    found = get_safetensors_params_metadata(model.model, revision=model.revision)
    return [(name, tensor) for name, tensor in found.items() if name != "__metadata__"]


def _bytes(name: str, tensor: Mapping[str, Any], itemsize: int, quantized: formats.Format | None) -> int:
    if tensor["dtype"] in CONVERTED:
        shape = tensor["shape"]
        if quantized and len(shape) == 2 and not any(part in name for part in UNQUANTIZED):
            return quantized.bytes_of(*shape)
        return math.prod(shape) * itemsize
    begin, end = tensor["data_offsets"]
    return int(end - begin)
