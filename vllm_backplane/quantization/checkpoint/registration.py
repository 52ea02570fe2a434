"""Registers Backplane's configurations of quantized checkpoints with vLLM, in the place of vLLM's own.

vLLM's registry lets a plugin replace the class of an existing name. The classes registered here import the real one
when vLLM calls them: importing vLLM's formats takes a third of a second, which only a quantized checkpoint needs.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_backplane.errors import CheckpointError, short_repr
from vllm_backplane.quantization.base import BackplaneQuantizationConfig
from vllm_backplane.runtime import runtime

_PACKAGE = "vllm_backplane.quantization.checkpoint"
CLASSES = {
    f"{_PACKAGE}.gptq:BackplaneGPTQConfig": ("auto_gptq", "gptq", "gptq_marlin"),
    f"{_PACKAGE}.awq:BackplaneAWQConfig": ("auto_awq", "awq", "awq_marlin"),
    f"{_PACKAGE}.compressed_tensors:BackplaneCompressedTensorsConfig": ("compressed-tensors",),
}
"""module:Class of each configuration, and vLLM's names for its format."""

NAMES = tuple(name for names in CLASSES.values() for name in names)

SUPPORTED = (
    "GPTQ with 4 or 8 bits (desc_act too)",
    "AWQ with 4 or 8 bits and zero points",
    "compressed-tensors W4A16 and W8A16 (pack-quantized)",
    "compressed-tensors W8A8-int8 (inputs per token, symmetric)",
    "GGUF",
)
"""Quantized checkpoints that run on every device: all of them use the operator `quantized_linear`, for which a device
has a kernel or uses the reference."""


def unsupported(what: str) -> CheckpointError:
    """Returns the error for a checkpoint that does not run here. It lists those that do."""
    return CheckpointError(
        f"{what} does not run on device {runtime().device.name!r}; choose a checkpoint of: {'; '.join(SUPPORTED)}; or "
        "one in full precision, with --quantization int8 or int4 to quantize it while it is loaded"
    )


def require_integers(format_name: str, **values: Any) -> None:
    """Raises CheckpointError unless the values of a checkpoint's quantization config are integers other than 0."""
    for name, value in values.items():
        if type(value) is not int or value == 0:
            raise CheckpointError(
                f"the quantization config of this {format_name} checkpoint has {short_repr(value)} for {name}, not an "
                "integer other than 0; download the checkpoint again"
            )


def require_finite(scales: torch.Tensor, prefix: str) -> None:
    """Raises CheckpointError if a scale of a layer is NaN or infinite, which would make all outputs NaN."""
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"the scales of {prefix} have NaN or infinite values; download the checkpoint again")


class LazyConfig(BackplaneQuantizationConfig):
    """Takes the place of a configuration class that is imported on first use."""

    path: ClassVar[str]
    name: ClassVar[str]

    @classmethod
    def config_class(cls) -> type[QuantizationConfig]:
        module, _, name = cls.path.partition(":")
        found: type[QuantizationConfig] = getattr(importlib.import_module(module), name)
        return found

    @classmethod
    def get_name(cls) -> Any:  # vLLM's type lists its own names
        return cls.name

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        return cls.config_class().from_config(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        return cls.config_class().override_quantization_method(hf_quant_cfg, user_quant, hf_config=hf_config)

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return cls.config_class().get_config_filenames()

    def get_quant_method(self, layer: Any, prefix: str) -> None:
        raise NotImplementedError("vLLM calls get_quant_method on the object that from_config returns")


@cache
def register() -> None:
    """Registers the configurations with vLLM, once per process."""
    for path, names in CLASSES.items():
        lazy = type(f"LazyConfig_{names[0]}", (LazyConfig,), {"path": path, "name": names[0]})
        for name in names:
            register_quantization_config(name)(lazy)
