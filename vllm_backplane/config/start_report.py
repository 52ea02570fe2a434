"""Reports the model and the device of a server that starts, when vLLM's configuration is complete."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_backplane.gguf.hf_config import QUANTIZATION
from vllm_backplane.process import start_events
from vllm_backplane.runtime import Runtime

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CHECKPOINTS = ("*.safetensors", "*.bin", "*.pt")
"""Files with weights, by kind. vLLM loads the first kind that a folder has."""


def report_model(config: VllmConfig, chosen: Runtime) -> None:
    """Reports the model with its format and size, and the device with the reason of its choice."""
    model = config.model_config
    if model is None or start_events.announced() is None or multiprocessing.parent_process() is not None:
        return
    start_events.report(
        "model",
        name=str(model.served_model_name),
        format=format_of(model),
        bytes=size_on_disk(model),
        dtype=str(model.dtype).removeprefix("torch."),
        context=model.max_model_len,
        device=chosen.device.name,
        reason=chosen.selection.reason,
    )


def format_of(model: Any) -> str:
    """Returns the format of a model's weights."""
    if model.quantization == QUANTIZATION:
        return "GGUF"
    return f"quantized ({model.quantization})" if model.quantization else "full precision"


def size_on_disk(model: Any) -> int | None:
    """Returns the bytes of the files with the weights, or None if they are not on this host."""
    path = Path(model.hf_config.quantization_config["file"] if model.quantization == QUANTIZATION else model.model)
    try:
        if path.is_file():
            return path.stat().st_size
        for pattern in ("*.gguf",) if model.quantization == QUANTIZATION else CHECKPOINTS:
            if found := sum(file.stat().st_size for file in path.glob(pattern)):
                return found
    except OSError:
        pass  # such as a link to a file that is gone, which is an error for the loader if it needs the file
    return None
