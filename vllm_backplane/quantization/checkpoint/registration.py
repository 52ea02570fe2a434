"""The names under which vLLM finds our configuration classes, instead of its own.

vLLM's registry takes a class for a name that it has, and then uses that. What is registered here stands for the class:
importing vLLM's own takes a third of a second, which only a quantized checkpoint is to pay for.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, ClassVar

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_backplane.quantization.base import BackplaneQuantizationConfig

_HERE = "vllm_backplane.quantization.checkpoint"
CLASSES = {
    f"{_HERE}.gptq:BackplaneGPTQConfig": ("auto_gptq", "gptq", "gptq_marlin"),
    f"{_HERE}.awq:BackplaneAWQConfig": ("auto_awq", "awq", "awq_marlin"),
    f"{_HERE}.compressed:BackplaneCompressedTensorsConfig": ("compressed-tensors",),
}
"""module:Class of ours, and vLLM's names for the format."""

NAMES = tuple(name for names in CLASSES.values() for name in names)


class Standing(BackplaneQuantizationConfig):
    """For a class that is imported when vLLM asks for something."""

    path: ClassVar[str]
    name: ClassVar[str]

    @classmethod
    def meant(cls) -> type[QuantizationConfig]:
        module, _, name = cls.path.partition(":")
        found: type[QuantizationConfig] = getattr(importlib.import_module(module), name)
        return found

    @classmethod
    def get_name(cls) -> Any:  # vLLM's type lists its own names
        return cls.name

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        return cls.meant().from_config(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        return cls.meant().override_quantization_method(hf_quant_cfg, user_quant, hf_config=hf_config)

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return cls.meant().get_config_filenames()

    def get_quant_method(self, layer: Any, prefix: str) -> None:
        raise NotImplementedError("vLLM asks what from_config made")


@cache
def register() -> None:
    """Once per process."""
    for path, names in CLASSES.items():
        standing = type(f"Standing_{names[0]}", (Standing,), {"path": path, "name": names[0]})
        for name in names:
            register_quantization_config(name)(standing)
